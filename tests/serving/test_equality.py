"""Every method gives on vLLM what it gives on Transformers (fp32)."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas.engine.workflow import fully_connected
from tests.serving.methods import SELECTIONS
from tests.serving.play import (
    Pair,
    distance,
    play_host,
    play_reference,
    reference_engine,
)

pytestmark = pytest.mark.vllm

CLOSE = 1e-3
WORKFLOW = fully_connected(3)

# Method, settings, and whether decisions are forced: dense in the first two requests, which fill
# pools, accepted afterwards.
CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("nonshared", {}, False),
    ("fullshared", {}, False),
    ("fullshared", {"pf_policy": "rotate"}, False),
    ("fullshared", {"pf_policy": "delta"}, False),
    ("kvcmas", {"rank_base": None, "rank_delta": None, "tau": 1}, False),
    ("kvcmas", {"rank_base": 8, "rank_delta": 8}, True),
    ("kvcmas", {"chained": False}, True),
    ("kvcmas", {"chained": False, "reference": "background", "first_turn": "dense"}, True),
    ("kvcmas", {"weights": "token_knn"}, True),
    ("kvcomm", {}, True),
    ("kvcomm", {"base": "producer", "gate_scope": "prompt"}, True),
    ("graphflow", {"n_cal": 2}, True),
    ("droidspeak", {"blocks": ((2, 2),)}, False),
    ("droidspeak", {"blocks": ((0, 1), (3, 3))}, False),
    ("tests.serving.methods:RecordedCacheBlend", {"ratio": 0.2}, False),
    ("tests.serving.methods:RecordedCacheBlend", {"ratio": 0.3, "write_back": "full"}, False),
    ("tests.serving.methods:RecordedRelay", {"span": (1, 2, 3), "ratio": 0.4}, False),
    (
        "tests.serving.methods:RecordedRelay",
        {"span": (0, 2, 3), "ratio": 0.4, "influence": "all"},
        False,
    ),
    ("epic", {"tokens": 5}, False),
]


def names(cases: list[tuple[str, dict[str, Any], bool]]) -> list[str]:
    return [f"{method.split(':')[-1]}-{settings}" for method, settings, _ in cases]


@pytest.mark.parametrize(("method", "settings", "forces"), CASES, ids=names(CASES))
def test_first_tokens_equal_those_of_the_transformers_engine(
    pair: Pair, method: str, settings: dict[str, Any], forces: bool
) -> None:
    assert_equal(pair, method, settings, forces)


def assert_equal(pair: Pair, method: str, settings: dict[str, Any], forces: bool) -> None:
    """Four requests on both engines, turn by turn; where decisions are forced, the last two reuse.

    Rows that a method selects are those of the first engine, so that a near tie is no difference.
    How far the second engine would have selected the same is checked apart.
    """
    SELECTIONS.overlaps.clear()
    engine = reference_engine(pair, method, settings)
    pair.host.configure(method, settings)
    reused = 0
    for n in range(4):
        accept = (n >= 2) if forces else None
        tail = 0 if n == 3 else 5  # the last prompts end with a PH
        expected = play_reference(engine, WORKFLOW, n, accept, tail=tail)
        served = play_host(pair, WORKFLOW, n, accept, tail=tail)
        for turn, result in zip(served, expected, strict=True):
            report = turn.report
            assert report is not None
            assert report.fell_back is None
            assert distance(turn, result) <= CLOSE
            assert report.prompt_sha256 == result.prompt.sha256
            assert report.accounting.shared == result.accounting.shared
            assert report.accounting.reference_tokens == result.accounting.reference_tokens
            assert report.first_seen == result.first_seen
            assert report.holders == result.holders
            for mine, theirs in zip(report.decisions, result.decisions, strict=True):
                assert (mine.edge, mine.action, mine.reason) == (
                    theirs.edge,
                    theirs.action,
                    theirs.reason,
                )
                if theirs.entropy is not None:
                    assert mine.entropy == pytest.approx(theirs.entropy, abs=1e-3)
            reused += report.accounting.prompt.reused + report.accounting.prompt.corrected
            assert turn.cached == report.external_rows
    assert (reused > 0) == (method != "nonshared")
    assert pair.host.stats()["workflows"] == 0
    assert not SELECTIONS.chosen
    assert min(SELECTIONS.overlaps, default=1.0) >= 0.95
    assert bool(SELECTIONS.overlaps) == ("Recorded" in method)
