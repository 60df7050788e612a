"""Verdicts on accuracy claims as orders of fidelity, from synthetic replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from results.records import Run
from results.verdicts import judged

Replayed = Callable[..., Run]


@pytest.fixture
def replayed(make_fidelity, make_fidelity_edge, make_replay) -> Replayed:
    """A method whose reuse turns diverge by ``kl``, give or take a tenth."""

    def make(method: str, kl: float, label: str = "", executed: int = 0, **info: object) -> Run:
        turns = tuple(
            make_fidelity(
                sample,
                (make_fidelity_edge(0.1, 0.1, executed=executed),),
                (kl * (1 + 0.1 * (sample % 2)),),
                turn_index=1,
            )
            for sample in range(6)
        )
        return make_replay(turns, method=method, label=label, **({"model": "real"} | info))

    return make


def verdict(id_: str, *runs: Run) -> str:
    return next(row.verdict for row in judged(runs) if row.claim.id == id_)


def test_kvcmas_against_every_sharing_method(replayed: Replayed) -> None:
    own = replayed("kvcmas", 0.01, "rho=0.8")
    rivals = [replayed("cacheblend", 0.02, "rho=0.9"), replayed("fullshared", 0.05)]
    assert verdict("C19", own, *rivals) == "agrees in direction"
    assert verdict("C19", own, *rivals, replayed("kvcomm", 0.005, "rho=0.8")) == "disagrees"
    # At its defaults a budget method holds no stated ratio.
    assert verdict("C19", own, *rivals, replayed("droidspeak", 0.005)) == "agrees in direction"
    assert verdict("C19", own) == "not measured"
    tiny = {"model": "tiny-llama"}
    others = (replayed("kvcmas", 0.01, "rho=0.8", **tiny), replayed("fullshared", 0.05, **tiny))
    assert verdict("C19", *others) == "not measured"


def test_chained_against_non_chained(replayed: Replayed) -> None:
    chained = replayed("kvcmas", 0.01, "rho=0.8")
    worse = replayed("kvcmas", 0.03, "chained=False rho=0.8")
    better = replayed("kvcmas", 0.001, "chained=False rho=0.8")
    assert verdict("C22", chained, worse) == "agrees in direction"
    assert verdict("C22", chained, better) == "disagrees"


def test_a_larger_threshold_reuses_more_and_diverges_more(replayed: Replayed) -> None:
    def swept(*values: tuple[float, int]) -> list[Run]:
        return [
            replayed("kvcmas", kl, f"tau={tau}", executed)
            for tau, (kl, executed) in zip((0.1, 0.2, 0.4), values, strict=True)
        ]

    assert verdict("C24", *swept((0.01, 20), (0.02, 10), (0.03, 0))) == "agrees"
    assert verdict("C24", *swept((0.03, 20), (0.02, 10), (0.01, 0))) == "disagrees"
    assert verdict("C24", *swept((0.01, 20), (0.04, 0), (0.02, 10))) == "disagrees"
    assert verdict("C24", *swept((0.01, 20), (0.02, 10), (0.03, 0))[:2]) == "not measured"


def test_kvcomm_recovers_what_fullshared_and_graphflow_lose(replayed: Replayed) -> None:
    lost = [replayed("fullshared", 0.05), replayed("graphflow", 0.1, "rho=0.8")]
    assert verdict("C33", *lost, replayed("kvcomm", 0.02, "rho=0.8")) == "agrees"
    assert verdict("C33", *lost, replayed("kvcomm", 0.07, "rho=0.8")) == "disagrees"
    assert verdict("C33", *lost) == "not measured"
