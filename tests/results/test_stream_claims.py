"""Verdicts on claims about a single stream: C26 to C32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from results.claims import LedgerRow
from results.records import Run
from results.verdicts import judged
from tests.results.conftest import FidelityFactory
from tests.streamed import stream_run


def rows(runs: list[Run]) -> dict[str, LedgerRow]:
    return {row.claim.id: row for row in judged(runs)}


def at(context: int, own: float, rival: float, **changes: Any) -> list[Run]:
    cell = {"shared_tokens": context * 1024, **changes}
    return [
        stream_run("nonshared", 1.0, **cell),
        stream_run("cacheblend", rival, **cell),
        stream_run("kvcmas", own, **cell),
    ]


@pytest.mark.parametrize(
    ("own", "rival", "near", "verdict"),
    [(0.2, 0.4, 0.41, "agrees"), (0.4, 0.2, 0.4, "disagrees"), (0.2, 0.4, 0.6, "disagrees")],
)
def test_fastest_at_long_contexts_and_comparable_at_2k(
    own: float, rival: float, near: float, verdict: str
) -> None:
    runs = [*at(2, near, 0.4), *at(8, own, rival), *at(32, own, rival)]
    found = rows(runs)["C27"]
    assert found.verdict == verdict
    assert set(found.runs) == {r.info.run_key for r in runs if r.info.method != "nonshared"}
    assert "far from" not in found.setting
    assert rows(at(8, own, rival))["C27"].verdict == "not measured"


def test_the_papers_shape_is_preferred_and_others_say_so() -> None:
    small = {"info": {"model": "bench-llama"}, "scale": 4.0}
    far = [*at(8, 0.4, 0.2, **small), *at(32, 0.4, 0.2, **small)]
    found = rows(far)["C27"]
    assert found.verdict == "disagrees"
    assert "far from the paper's shape (llama-3.1-8b, lengths / 1)" in found.setting
    near = [*at(8, 0.2, 0.4), *at(32, 0.2, 0.4)]
    assert rows([*far, *near])["C27"].verdict == "agrees"


def test_memory_beside_selective_methods_and_over_rho() -> None:
    def runs(low: int, high: int) -> list[Run]:
        return [
            stream_run("cacheblend", 0.5),
            stream_run("kvcmas", 0.3, pool=low, rho=0.8),
            stream_run("kvcmas", 0.3, pool=high, rho=0.6),
        ]

    assert rows(runs(3 * 10**8, 3 * 10**8))["C26"].verdict == "agrees"
    assert rows(runs(3 * 10**8, 9 * 10**8))["C26"].verdict == "disagrees"
    assert rows(runs(3 * 10**9, 3 * 10**9))["C26"].verdict == "disagrees"


@pytest.mark.parametrize(("number", "claim"), [("agents", "C30"), ("rounds", "C31")])
def test_scaling(number: str, claim: str) -> None:
    def runs(own: float, growth: int) -> list[Run]:
        made = []
        for value in (2, 4, 8):
            cell = {number: value, "shared_tokens": 32_768}
            made += [
                stream_run("cacheblend", 0.5, **cell),
                stream_run("kvcmas", own, pool=growth * value, **cell),
            ]
        return made

    assert rows(runs(0.2, 10**7))[claim].verdict == "agrees"
    # One more shape, nearer to the paper's, but run for one number only.
    once = [stream_run(m, 0.4, shared_tokens=32_768) for m in ("cacheblend", "kvcmas")]
    far = [
        stream_run(method, seconds, shared_tokens=32_768, scale=16.0, **{number: value})
        for value in (2, 4, 8)
        for method, seconds in (("cacheblend", 0.5), ("kvcmas", 0.2))
    ]
    assert rows(once)[claim].verdict == "not measured"
    assert rows([*once, *far])[claim].verdict == "agrees"
    assert rows(runs(0.2, 10**9))[claim].verdict == "disagrees"  # memory grows
    assert rows(runs(0.7, 10**7))[claim].verdict == "disagrees"
    assert rows(runs(0.2, 10**7)[:4])[claim].verdict == "not measured"


def test_compute_at_equal_ratios() -> None:
    def runs(own: float) -> list[Run]:
        equal = {"rho": 0.8, "label": "rho=0.8"}
        return [
            stream_run("cacheblend", 0.5, flops=100.0, **equal),
            stream_run("kvcmas", 0.5, flops=own, rho=0.8),
        ]

    found = rows(runs(80.0))["C32"]
    assert found.verdict == "agrees"
    (ratio,) = found.measured
    assert ratio.quantity == "FLOPs CacheBlend/KVCMAS at rho 0.8, at 8K"
    assert ratio.value == 1.25
    assert rows(runs(120.0))["C32"].verdict == "disagrees"
    other = [stream_run("cacheblend", 0.5, flops=1.0), *runs(2.0)[1:]]
    assert rows(other)["C32"].verdict == "not measured"  # 0.9 against 0.8


def ranked(rank: int | None, ttft: float = 0.3) -> Run:
    label = "rho=0.8" if rank == 32 else f"rank_base={rank} rank_delta={rank} rho=0.8"
    ranks = {"rank_base": rank, "rank_delta": rank}
    return stream_run("kvcmas", ttft, label=label, settings=ranks, pool=10**6 * (rank or 999))


def sized(size: int, ttft: float = 0.3) -> Run:
    label = "rho=0.8" if size == 10 else f"capacity={size} rho=0.8"
    return stream_run("kvcmas", ttft, label=label, settings={"capacity": size})


Replay = Callable[[str, float], Run]


@pytest.fixture
def replay(
    make_fidelity: FidelityFactory,
    make_fidelity_edge: Callable[..., dict[str, Any]],
    make_replay: Callable[..., Run],
) -> Replay:
    """A fidelity run of a variant with a first-token KL."""

    def made(label: str, kl: float) -> Run:
        edge = make_fidelity_edge(k=0.1, v=0.2)
        turns = tuple(make_fidelity(i, edges=(edge,), kl=(kl,)) for i in range(2))
        return make_replay(turns, method="kvcmas", label=label)

    return made


def test_ranks_help_up_to_32(replay: Replay) -> None:
    costs = [ranked(16), ranked(32), ranked(None)]
    assert rows(costs)["C28"].verdict == "not measured"  # without quality
    labels = [run.info.label for run in costs]

    def verdict(*kls: float) -> str:
        quality = [replay(label, kl) for label, kl in zip(labels, kls, strict=True)]
        return rows([*costs, *quality])["C28"].verdict

    assert verdict(0.3, 0.1, 0.08) == "agrees"
    assert verdict(0.3, 0.25, 0.1) == "disagrees"
    quality = [replay(label, kl) for label, kl in zip(labels, (0.3, 0.1, 0.08), strict=True)]
    slow = [*costs[:2], ranked(None, ttft=0.6)]
    assert rows([*slow, *quality])["C28"].verdict == "disagrees"


def test_pools_help_up_to_10(replay: Replay) -> None:
    costs = [sized(size) for size in (2, 5, 10, 20)]
    labels = [run.info.label for run in costs]

    def verdict(runs: list[Run], *kls: float) -> str:
        quality = [replay(label, kl) for label, kl in zip(labels, kls, strict=True)]
        return rows([*runs, *quality])["C29"].verdict

    assert verdict(costs, 0.3, 0.2, 0.1, 0.09) == "agrees"
    assert verdict(costs, 0.3, 0.28, 0.25, 0.1) == "disagrees"
    assert verdict([*costs[:3], sized(20, 0.9)], 0.3, 0.2, 0.1, 0.09) == "disagrees"
