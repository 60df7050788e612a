from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from baselines.cacheblend import CacheBlend
from baselines.fullshared import FullShared
from kvcmas.engine.contract import Candidates, Select
from kvcmas.engine.executor import Executor, Prefill
from kvcmas.errors import UserError
from tests.baselines.scenes import LAYERS, OUT, Q, Scene, executed, make_scene


@pytest.fixture(scope="module")
def scene(executor: Executor) -> Scene:
    return make_scene(executor)


def rho(run: Prefill) -> float:
    entries = run.accounting.shared.values()
    return 1 - sum(e.executed for e in entries) / sum(e.total for e in entries)


def extra_work(scene: Scene, run: Prefill) -> int:
    return run.accounting.row_layers - scene.serve(FullShared())[1].accounting.row_layers


def candidates(v_gap: torch.Tensor, k_gap: torch.Tensor, rows: torch.Tensor) -> Candidates:
    """Two heads of width 2, whose fresh K and V are off by a given amount per row."""
    old = torch.zeros(2, len(rows), 2)
    return Candidates(1, rows, old + k_gap[:, None], old + v_gap[:, None], old, old)


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_rho_and_work_of_the_headline(ratio: float, scene: Scene) -> None:
    """Convention A: rho = 1 - r (L - 1) / L; layer 0 is run but stays reused."""
    _, run = scene.serve(CacheBlend(ratio=ratio))
    rows = scene.shared_rows()
    count = round(ratio * len(rows))
    assert rho(run) == pytest.approx(1 - ratio * (LAYERS - 1) / LAYERS)
    written = executed(run.buffer)[:, rows]
    assert written.sum(dim=1).tolist() == [0, count, count, count]
    assert (written[1:] == written[1]).all()
    assert extra_work(scene, run) == 2 * len(rows) + (LAYERS - 2) * count
    assert run.accounting.touched_rows == len(rows)


def test_rho_of_full_write_back(scene: Scene) -> None:
    """Convention B: the check layer is rebuilt in full."""
    _, run = scene.serve(CacheBlend(ratio=0.25, write_back="full"))
    assert rho(run) == pytest.approx(1 - (1 + 0.25 * (LAYERS - 2)) / LAYERS)


def test_later_check_layer(scene: Scene) -> None:
    """Layers between 0 and the check layer are rebuilt in full."""
    _, run = scene.serve(CacheBlend(ratio=0.25, check_layer=2))
    rows = scene.shared_rows()
    assert executed(run.buffer)[:, rows].sum(dim=1).tolist() == [0, len(rows), 9, 9]


@pytest.mark.parametrize("scope", ["prompt", "segment"])
def test_gradual_filtering_is_nested_and_keeps_the_mean(scope: str, scene: Scene) -> None:
    _, run = scene.serve(CacheBlend(ratio=0.5, gradual=True, scope=scope))  # type: ignore[arg-type]
    written = executed(run.buffer)[1:, scene.shared_rows()]
    assert written.sum(dim=1).tolist() == [27, 18, 9]
    assert not (written[1:] & ~written[:-1]).any()


def test_gradual_filtering_measures_again(scene: Scene) -> None:
    """In later layers the survivors are those that deviate most there."""
    seen: list[tuple[Candidates, torch.Tensor]] = []
    plan = CacheBlend(ratio=0.4, gradual=True).plan(scene.turn, scene.sources)

    def spy(event: Select) -> Select:
        def choose(given: Candidates) -> torch.Tensor:
            seen.append((given, event.choose(given)))
            return seen[-1][1]

        return Select(event.layer, event.rows, choose, event.write_all)

    events = tuple(spy(event) if isinstance(event, Select) else event for event in plan.events)
    scene.executor.run(scene.prompt, type(plan)(plan.fills, events, plan.decisions))
    assert [given.layer for given, _ in seen] == [1, 2, 3]
    for (_, before), (given, kept) in pairwise(seen):
        assert torch.equal(given.rows, before.sort().values)
        gap = (given.v_new - given.v_old).square().sum(dim=(0, 2))
        inside = torch.isin(given.rows, kept)
        assert gap[inside].min() > gap[~inside].max()


@pytest.mark.parametrize(("deviation", "expected"), [("value", [17, 47]), ("key", [16, 20])])
def test_rows_that_deviate_most(deviation: str, expected: list[int], scene: Scene) -> None:
    """The square ignores the sign; K and V are told apart."""
    method = CacheBlend(ratio=2 / 36, deviation=deviation)  # type: ignore[arg-type]
    plan = method.plan(scene.turn, scene.sources)
    select = next(event for event in plan.events if isinstance(event, Select))
    rows = select.rows
    v_gap, k_gap = 0.1 * torch.ones(len(rows)), 0.1 * torch.ones(len(rows))
    v_gap[torch.searchsorted(rows, torch.tensor([17, 47]))] = torch.tensor([3.0, -4.0])
    k_gap[torch.searchsorted(rows, torch.tensor([16, 20]))] = torch.tensor([-1.0, 1.0])
    assert sorted(select.choose(candidates(v_gap, k_gap, rows)).tolist()) == expected


def test_scope_of_the_budget(scene: Scene) -> None:
    """All deviation in the query: the prompt's budget goes there, each segment's does not."""
    for scope, shares in (("prompt", [9, 0]), ("segment", [6, 3])):
        method = CacheBlend(ratio=0.25, scope=scope)  # type: ignore[arg-type]
        plan = method.plan(scene.turn, scene.sources)
        select = next(event for event in plan.events if isinstance(event, Select))
        gap = torch.isin(select.rows, torch.tensor(scene.prompt.rows(Q))).float()
        chosen = select.choose(candidates(gap, gap, select.rows))
        split = [
            int(torch.isin(chosen, torch.tensor(scene.prompt.rows(i))).sum()) for i in (Q, OUT)
        ]
        assert split == shares


def test_check_sees_fresh_values_beside_reused_ones(scene: Scene) -> None:
    """At the check layer the fresh side is what dense prefill has there (layer 0 was exact)."""
    seen: list[Candidates] = []

    def watch(given: Candidates) -> torch.Tensor:
        seen.append(given)
        return given.rows

    plan = CacheBlend().plan(scene.turn, scene.sources)
    events = tuple(
        Select(e.layer, e.rows, watch) if isinstance(e, Select) else e for e in plan.events
    )
    scene.executor.run(scene.prompt, type(plan)(plan.fills, events, plan.decisions))
    (given,) = seen
    for fresh, exact in (
        (given.v_new, scene.dense.buffer.v[1]),
        (given.k_new, scene.dense.buffer.k[1]),
    ):
        torch.testing.assert_close(fresh, exact[:, given.rows], atol=2e-5, rtol=0)
    source = torch.cat([scene.sources.caches[i].cache.v[1] for i in (Q, OUT)], dim=1)
    assert torch.equal(given.v_old, source)


def test_budget() -> None:
    assert CacheBlend.for_rho(0.9, 32).ratio == pytest.approx(0.1)
    full = CacheBlend.for_rho(0.8, 32, "full")
    assert 1 - (1 + full.ratio * 30) / 32 == pytest.approx(0.8)
    assert full.write_back == "full"
    with pytest.raises(UserError, match="out of reach"):
        CacheBlend.for_rho(0.98, 32, "full")


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 1.1},
        {"ratio": -0.1},
        {"ratio": float("nan")},
        {"check_layer": 0},
        {"check_layer": 1.5},
        {"deviation": "hidden"},
        {"write_back": "none"},
        {"scope": "layer"},
        {"gradual": "yes"},
    ],
)
def test_illegal_settings(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        CacheBlend(**settings)  # type: ignore[arg-type]
