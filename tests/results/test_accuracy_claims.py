"""Verdicts on latency claims, from synthetic accuracy runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from results.records import Run
from results.verdicts import judged

Timed = Callable[..., Run]


@pytest.fixture
def timed(make_run) -> Timed:
    """A run whose questions take ``latency`` seconds, give or take a tenth."""

    def make(method: str, latency: float, ttft: float = 0.5, bench: str = "mmlu") -> Run:
        settings = {"chained": True} if method == "kvcmas" else {}
        run = make_run((True,) * 6, method=method, bench=bench, settings=settings, model="real")
        samples = tuple(
            sample.model_copy(
                update={
                    "e2e_s": latency * (1 + 0.1 * (sample.sample_index % 2)),
                    "ttft_mean_s": ttft * (1 + 0.1 * (sample.sample_index % 2)),
                }
            )
            for sample in run.samples
        )
        return replace(run, samples=samples)

    return make


def verdict(id_: str, *runs: Run) -> str:
    return next(row.verdict for row in judged(runs) if row.claim.id == id_)


def test_latency_and_ttft_against_delta_methods(timed: Timed) -> None:
    own = timed("kvcmas", 1.0, 0.2)
    assert verdict("C20", own, timed("kvcomm", 2.0, 0.4)) == "agrees"
    assert verdict("C20", own, timed("kvcomm", 2.0, 0.1)) == "disagrees"
    assert verdict("C20", own, timed("kvcomm", 2.0), timed("graphflow", 0.9)) == "disagrees"
    assert verdict("C20", own) == "not measured"


def test_gsm8k_is_shown_and_not_judged_against_selective_methods(timed: Timed) -> None:
    runs = [timed("kvcmas", 1.0), timed("cacheblend", 1.5)]
    exception = [timed("kvcmas", 1.0, bench="gsm8k"), timed("cacheblend", 0.5, bench="gsm8k")]
    assert verdict("C21", *runs, *exception) == "agrees"
    row = next(r for r in judged([*runs, *exception]) if r.claim.id == "C21")
    assert any("GSM8K" in text for text in row.texts)
    assert verdict("C21", *exception) == "not measured"
    assert verdict("C21", timed("kvcmas", 1.0), timed("droidspeak", 0.9)) == "disagrees"
