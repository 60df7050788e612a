"""The ledger is complete, agrees with the list it was made from, and claims nothing by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from results.claims import CLAIM_IDS, LedgerRow, load_claims, load_ledger, parse_ledger
from results.errors import ClaimError

SOURCE = Path(__file__).parents[2] / ".." / "shared" / "research" / "claims.md"
DATA = Path(__file__).parents[2] / "results" / "claims.yaml"


def test_all_claims_are_there_in_order() -> None:
    assert tuple(claim.id for claim in load_claims()) == CLAIM_IDS


@pytest.mark.skipif(not SOURCE.exists(), reason="the research notes are not beside the repository")
def test_sections_kinds_scopes_and_numbers_follow_the_notes() -> None:
    rows = re.findall(
        r"^\| (C\d\d) \| (.*?) \| (.*?) \| (\w+) \| (.*?) \|$", SOURCE.read_text(), re.M
    )
    assert len(rows) == len(CLAIM_IDS)
    for claim, (id_, section, _, kind, here) in zip(load_claims(), rows, strict=True):
        assert claim.id == id_
        named = section.replace("Fig ", "Figure ").replace("Tab ", "Table ")
        assert claim.section == tuple(named.split(", "))
        assert claim.kind == kind
        assert set(claim.here) == set(re.findall(r"\b(?:cpu|calc|gpu)\b", here.lower())), id_


def test_every_number_of_the_prose_is_structured() -> None:
    values = {
        claim.id: [
            (v.value if v.value is not None else (v.low, v.high)) for v in claim.paper_values
        ]
        for claim in load_claims()
    }
    assert {id_: numbers for id_, numbers in values.items() if numbers} == {
        "C01": [2.0],
        "C02": [2.1],
        "C03": [0.73, 0.73],
        "C04": [0.66, 0.66],
        "C05": [2.3, 2.4],
        "C08": [80, 80, 80],
        "C09": [3.7],
        "C10": [2.5, 6.2, 14.9],
        "C11": [31.94, 435.6],
        "C12": [50],
        "C14": [32],
        "C15": [(4, 6), 0.9],
        "C17": [0.5],
        "C18": [0.2],
        "C19": [3, 0.7],
        "C22": [6.44, 1.53],
        "C23": [(0.3, 0.9)],
        "C25": [0.65],
        "C35": [48],
    }


def test_paper_settings() -> None:
    paper = load_ledger().paper
    assert (paper.rank_base, paper.rank_delta) == (32, 32)
    assert (paper.pool_capacity, paper.pool_capacity_kvcomm) == (10, 20)
    taus = {name: workload.tau for name, workload in paper.workloads.items()}
    assert taus == {
        "mmlu": 0.29,
        "gsm8k": 0.32,
        "humaneval": 0.34,
        "mathvista": 0.50,
        "videomme": 0.60,
    }
    assert paper.traces.shared_tokens == (2048, 8192, 32768)


def test_no_verdict_without_a_record() -> None:
    claim = load_claims()[0]
    assert {LedgerRow(claim).verdict for claim in load_claims()} == {"not measured"}
    assert LedgerRow(claim, "agrees", ("0123456789abcdef",)).verdict == "agrees"
    with pytest.raises(ClaimError, match="C01: verdict 'agrees' with 0 runs"):
        LedgerRow(claim, "agrees")
    with pytest.raises(ClaimError, match="C01: verdict 'not measured' with 1 runs"):
        LedgerRow(claim, runs=("0123456789abcdef",))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("- id: C07", "- id: C06", "claims given twice: C06"),
        ("- id: C37", "- id: C38", "claims missing or unknown: C37, C38"),
        ("kind: ratio", "kind: rate", r"claims\.0\.kind: Input should be"),
        ("relation: equal, value: 2.0,", "relation: between, value: 2.0,", "takes low and high"),
        ("here: [cpu, calc, gpu]", "here: [cpu, cpu]", "each scope once"),
        ("    command: &at_the_point", "    comand: &at_the_point", "Extra inputs"),
        ("  points:\n", "  dots:\n", r"rules\.dots"),
        ("paper:", "paper: {", "not YAML"),
    ],
)
def test_a_damaged_ledger_says_what_is_wrong(old: str, new: str, message: str) -> None:
    text = DATA.read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(ClaimError, match=message):
        parse_ledger(text.replace(old, new, 1))


def test_a_ratio_needs_the_papers_value() -> None:
    text = DATA.read_text(encoding="utf-8")
    text = text.replace("kind: order", "kind: ratio", 1)
    with pytest.raises(ClaimError, match="kind ratio needs the paper's value"):
        parse_ledger(text)
