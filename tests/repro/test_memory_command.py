"""`repro memory` as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvcmas.errors import UserError
from repro.cli import app
from repro.runners.memory_claims import memory_findings
from results.records import read_runs
from results.verdicts import judged, worst


def memory(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["memory", *arguments])


def row(output: str, heading: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.startswith(heading + " "))
    return line[len(heading) :].split()


def test_bytes_by_category_beside_each_other() -> None:
    ended = memory("--method", "kvcomm,kvcmas", "--set", "kvcomm.capacity=1", "--set", "capacity=1")
    assert ended.exit_code == 0
    assert row(ended.output, "weights") == ["16,060,522,496"] * 2
    rows = 1024 + 32_768 + 512 + 5 + 2 * (16 + 128) + 128
    assert row(ended.output, "active KV") == [f"{rows * 131_072:,}"] * 2
    # One anchor per slot: whole caches; factors of two edges of the query, three of the outputs.
    whole, factors = (32_768 + 2 * 128) * 131_072, 2 * (32_768 + 1024) + 3 * (128 + 1024)
    assert row(ended.output, "pool: base") == [f"{whole:,}", f"{factors * 2 * 32 * 32 * 2:,}"]
    assert "capacity=1" in ended.output and "published configuration" in ended.output


def test_lengths_of_a_prompt_can_be_given() -> None:
    small = ("--model=tiny-llama", "--ctx=100", "--method=nonshared", "--layout=L0", "--outputs=7")
    ended = memory(*small, "--system=10", "--private=3", "--tail=1", "--dtype=bfloat16")
    assert row(ended.output, "active KV") == [f"{(10 + 100 + 3 + 1 + 7) * 2 * 4 * 64 * 2:,}"]
    assert row(ended.output, "pool: delta") == ["0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "llama-9"), "unknown model"),
        (("--method", "kvcmos"), "unknown method"),
        (("--ctx", "many"), "no number of tokens"),
        (("--set", "rank=3"), "no chosen method has a setting"),
        (("--method", "kvcmas", "--set", "pf_policy=rotate"), "not counted"),
        (("--claims", "--ctx", "2k"), "takes no option but --out"),
        (("--out", "runs"), "leaves a record of --claims"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[str, ...], message: str) -> None:
    ended = memory(*arguments)
    assert isinstance(ended.exception, UserError)
    assert message in str(ended.exception) and "\n" not in str(ended.exception)


def test_claims_stand_beside_the_papers_numbers() -> None:
    rows = {(r.claim, r.quantity): r for finding in memory_findings() for r in finding.rows}
    assert {claim for claim, _ in rows} == {*(f"C{n:02}" for n in range(8, 14)), "C35"}
    exact = rows["C12", "V (1 + N) caches of the segment"]
    assert (exact.ours, exact.gap) == (50, 0)
    assert all(
        r.verdict == "agrees" for (claim, _), r in rows.items() if claim == "C08" and r.paper
    )
    formulas = [r for (claim, _), r in rows.items() if claim == "C13" and r.paper]
    assert [r.ours for r in formulas] == pytest.approx([r.paper for r in formulas])
    nearest = rows["C11", "KVCMAS without source caches"]
    assert nearest.verdict is None and nearest.gap == pytest.approx(nearest.ours - 31.94)


def test_claims_are_printed_with_their_assumptions() -> None:
    ended = memory("--claims")
    assert ended.exit_code == 0
    assert "435.60 GB" in ended.output and "not publish" in ended.output


def test_claims_leave_a_record_that_the_ledger_judges(tmp_path: Path) -> None:
    for _ in range(2):  # the same numbers are there once
        assert memory("--claims", "--out", str(tmp_path)).exit_code == 0
    (run,) = read_runs(tmp_path)
    assert [s.sample_id for s in run.samples] == [*(f"C{n:02}" for n in range(8, 14)), "C35"]
    findings = {(r.claim, r.quantity): r for found in memory_findings() for r in found.rows}
    assert len(run.formulas) == len(findings)
    judgements = {row.claim.id: row for row in judged([run])}
    for claim in ("C08", "C09", "C10", "C11", "C12", "C13", "C35"):
        row = judgements[claim]
        own = [r.verdict for (id_, _), r in findings.items() if id_ == claim and r.verdict]
        assert row.verdict == worst(own) and row.runs == (run.info.run_key,)
    assert judgements["C26"].verdict == "not measured"
