"""Verdicts on serving claims."""

from __future__ import annotations

from typing import Any

import pytest

from results.errors import ClaimError
from results.records import Run
from results.verdicts import Evaluation, evaluates, judge_ratio, judged, worst
from tests.served import served_run

AT_THE_POINT = {"shared_tokens": 32_768, "qps": 8.0}


def verdicts(runs: list[Run]) -> dict[str, str]:
    return {row.claim.id: row.verdict for row in judged(runs) if row.verdict != "not measured"}


def point(method: str, service: float, **changes: Any) -> Run:
    return served_run(method, service, **AT_THE_POINT | changes)


def non_chained(service: float, first_turn: str) -> Run:
    settings = {"chained": False, "first_turn": first_turn}
    return point("kvcmas", service, label=f"chained=False {first_turn}", settings=settings)


def test_nothing_is_measured_without_records() -> None:
    assert verdicts([]) == {}


@pytest.mark.parametrize(
    ("value", "paper", "verdict"),
    [
        (2.0, 2.0, "agrees"),
        (1.71, 2.0, "agrees"),
        (1.5, 2.0, "agrees in direction"),
        (0.99, 2.0, "disagrees"),
        (0.73, 0.73, "agrees"),
        (0.9, 0.73, "agrees in direction"),
        (1.0, 0.73, "disagrees"),
    ],
)
def test_ratios(value: float, paper: float, verdict: str) -> None:
    assert judge_ratio(value, paper) == verdict


def test_a_claim_is_as_good_as_its_worst_number() -> None:
    assert worst(["agrees", "disagrees", "agrees in direction"]) == "disagrees"


@pytest.mark.parametrize(
    ("service", "verdict"), [(0.5, "agrees"), (0.8, "agrees in direction"), (1.2, "disagrees")]
)
def test_speed_up_over_nonshared(service: float, verdict: str) -> None:
    found = verdicts([point("nonshared", 1.0), point("kvcmas", service)])
    assert found["C01"] == found["C02"] == verdict


def test_the_numbers_and_the_setting_go_with_the_verdict() -> None:
    runs = [point("nonshared", 1.0, work_bound=1.0), point("kvcmas", 0.5, work_bound=2.36)]
    (row,) = [row for row in judged(runs) if row.claim.id == "C01"]
    assert row.runs == tuple(run.info.run_key for run in runs)
    assert row.texts[0].startswith("p50 NonShared/KVCMAS: 2.1")
    assert row.texts[0].endswith("work bound 2.36")
    assert "tiny-llama, transformers" in row.texts[1]


def test_few_requests_have_no_tail_to_judge() -> None:
    runs = [point(m, s, workflows=4) for m, s in (("nonshared", 1.0), ("kvcmas", 0.5))]
    assert "C01" in verdicts(runs) and "C02" not in verdicts(runs)


def test_both_first_turns_are_reported_and_the_corrected_one_judged() -> None:
    runs = [point("kvcmas", 0.66), non_chained(1.0, "corrected"), non_chained(2.0, "dense")]
    (row,) = [row for row in judged(runs) if row.claim.id == "C04"]
    assert row.verdict == "agrees"
    assert sum("dense" in text for text in row.texts) == 2  # p50 and p90


def test_other_loads_and_arrivals_are_not_the_point() -> None:
    runs = [point("nonshared", 1.0, qps=4.0), point("kvcmas", 0.5, qps=4.0)]
    runs += [point(m, 1.0, arrival="workflow") for m in ("nonshared", "kvcmas")]
    assert not {"C01", "C02"} & set(verdicts(runs))


def _sweep(rival: float) -> list[Run]:
    return [
        served_run(method, service * shared / 2048, shared_tokens=shared, qps=qps)
        for shared in (2048, 32_768)
        for qps in (0.0, 8.0)
        for method, service in (("nonshared", 2.0), ("kvcmas", 1.0), ("graphflow", rival))
    ]


def test_the_lowest_median_has_to_be_so_everywhere() -> None:
    assert verdicts(_sweep(0.9))["C06"] == "disagrees"
    row = next(row for row in judged(_sweep(1.5)) if row.claim.id == "C06")
    assert row.texts[0].startswith("p50 GraphFlow/KVCMAS (")
    assert "4 comparisons under 4 loads" in row.texts[-1]


def test_a_context_at_another_scale_is_never_mixed_in() -> None:
    divided = {"scale": 4.0, "info": {"bench": "T 32768+128 / 4", "data_sha256": "4" * 64}}
    others = [point(m, s, **divided) for m, s in (("nonshared", 90.0), ("kvcmas", 0.1))]
    alone, beside = (
        next(row for row in judged(runs) if row.claim.id == "C07")
        for runs in (_sweep(1.5), [*others, *_sweep(1.5)])
    )
    assert alone.verdict == beside.verdict
    assert alone.texts == beside.texts


def test_memory_claims_need_the_papers_model() -> None:
    def needs(shared: int, output: int, gigabytes: int, model: str) -> Run:
        return served_run(
            "kvcomm",
            1.0,
            info={"model": model},
            shared_tokens=shared,
            output_tokens=output,
            out_of_memory=True,
            memory_needed_bytes=gigabytes * 10**9,
        )

    points = ((8192, 128, 120), (32_768, 128, 440), (2048, 2048, 90))
    assert verdicts([needs(*point, "llama-3.1-8b") for point in points]) == {"C08": "agrees"}
    assert verdicts([needs(*point, "bench-llama") for point in points]) == {}


def test_a_claim_has_one_evaluator() -> None:
    def evaluate(claim: object, runs: object) -> Evaluation | None:
        return None

    with pytest.raises(ClaimError, match="C01 is evaluated twice"):
        evaluates("C01")(evaluate)


def test_only_real_cells_are_judged() -> None:
    emulated = {"mode": "emulated", "info": {"kind": "emulate"}}
    runs = [point("nonshared", 1.0, **emulated), point("kvcmas", 0.5, **emulated)]
    assert verdicts(runs) == {}
