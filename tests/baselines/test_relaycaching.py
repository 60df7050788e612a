from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baselines.fullshared import FullShared
from baselines.relaycaching import (
    RelayCaching,
    Span,
    candidate_spans,
    choose_range,
    value_deviation,
)
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Candidates, Select
from kvcmas.engine.executor import Executor
from kvcmas.errors import UserError
from tests.baselines.scenes import LAYERS, OUT, Q, Scene, assert_same_kv, executed, make_scene


@pytest.fixture(scope="module")
def scene(executor: Executor) -> Scene:
    return make_scene(executor)


def with_received(scene: Scene, received: torch.Tensor | None) -> Scene:
    """The output's source with this received attention."""
    cache = replace(scene.sources.caches[OUT].cache, received=received)
    return scene.with_cache(OUT, cache)


def select(method: RelayCaching, scene: Scene, deviation: torch.Tensor) -> list[int]:
    """Positions within the output that are selected, given its ``1 - cos`` per token."""
    event = next(e for e in method.plan(scene.turn, scene.sources).events if isinstance(e, Select))
    span = scene.prompt.rows(OUT)
    rows = torch.arange(span.start, span.stop)
    old = torch.zeros(1, len(rows), 2)
    old[..., 0] = 1
    cosine = 1 - deviation
    new = torch.stack((cosine, (1 - cosine**2).sqrt()), dim=-1)[None]
    chosen = event.choose(Candidates(event.layer, rows, old, new, old, old))
    return sorted((chosen - span.start).tolist())


def test_exact_relay_makes_the_range_exact(scene: Scene) -> None:
    """The target's own residual rows, exact K and V below the range and garbage from there on."""
    for i in (Q, OUT):
        exact = scene.dense.buffer.extract(scene.prompt.rows(i))
        k, v = exact.k.clone(), exact.v.clone()
        k[1:] += 1
        v[1:] -= 1
        scene = scene.with_cache(i, SegmentCache(k, v, {1: exact.residual(1)}))
    _, run = scene.serve(RelayCaching(span=(1, 2, 3), ratio=1))
    assert_same_kv(run.buffer, scene.dense.buffer)


@pytest.mark.parametrize("span", [(0, 1, 3), (1, 2, 3), (0, 2, 2), (1, 3, 3)])
def test_rho_and_work_follow_from_the_span(span: Span, scene: Scene) -> None:
    ratio, (start, detect, end) = 0.25, span
    _, run = scene.serve(RelayCaching(span=span, ratio=ratio))
    rows = scene.shared_rows()
    selected = sum(round(ratio * len(scene.prompt.segments[i])) for i in (Q, OUT))
    full, sparse = detect - start, end - detect + 1
    per_layer = [0] * start + [len(rows)] * full + [selected] * sparse
    per_layer += [0] * (LAYERS - len(per_layer))
    assert executed(run.buffer)[:, rows].sum(dim=1).tolist() == per_layer
    entries = run.accounting.shared.values()
    rho = 1 - sum(e.executed for e in entries) / sum(e.total for e in entries)
    assert rho == pytest.approx(1 - (full + sparse * ratio) / LAYERS)
    _, plain = scene.serve(FullShared())
    extra = run.accounting.row_layers - plain.accounting.row_layers
    # The detection layer forms K and V of all rows before it drops some.
    assert extra == (full + 1) * len(rows) + (sparse - 1) * selected


def test_selected_rows_are_the_same_in_all_sparse_layers(scene: Scene) -> None:
    _, run = scene.serve(RelayCaching(span=(0, 1, 3), ratio=0.3))
    written = executed(run.buffer)[1:, scene.shared_rows()]
    assert (written == written[0]).all()


@pytest.mark.parametrize(
    ("received", "suffix", "expected"),
    [
        (None, 0, [2]),
        (None, 3, [2, 9, 10, 11]),
        ([1.0] * 12, 0, [2]),
        ([1.0] * 4 + [3.0] + [1.0] * 7, 0, [2, 4]),
        ([1.0] * 4 + [1.4] + [1.0] * 7, 0, [2]),
    ],
)
def test_published_thresholds(
    received: list[float] | None, suffix: int, expected: list[int], scene: Scene
) -> None:
    """Union of 1.5 times the mean deviation, 1.45 times the mean influence, and the suffix."""
    given = with_received(scene, None if received is None else torch.tensor(received))
    deviation = torch.full((12,), 0.1)
    deviation[2] = 0.2
    method = RelayCaching(span=(1, 2, 3), suffix=suffix)
    assert select(method, given, deviation) == expected


def test_influence_can_be_left_out(scene: Scene) -> None:
    given = with_received(scene, torch.tensor([1.0] * 4 + [9.0] + [1.0] * 7))
    method = RelayCaching(span=(1, 2, 3), suffix=0, influence="none")
    deviation = torch.linspace(0.1, 0.3, 12)
    assert 4 not in select(method, given, deviation)
    assert method.wants.received is None
    assert RelayCaching(span=(1, 2, 3)).wants.received == "decode"


def test_fixed_budget_charges_the_suffix_first(scene: Scene) -> None:
    deviation = torch.linspace(0.4, 0.1, 12)
    given = with_received(scene, None)
    for ratio, suffix, expected in (
        (0.5, 2, [0, 1, 2, 3, 10, 11]),
        (0.25, 10, [9, 10, 11]),
        (0.25, 0, [0, 1, 2]),
        (0, 10, []),
    ):
        method = RelayCaching(span=(1, 2, 3), ratio=ratio, suffix=suffix)
        assert select(method, given, deviation) == expected


def test_without_deviation_nothing_passes_a_threshold(scene: Scene) -> None:
    given = with_received(scene, None)
    assert select(RelayCaching(span=(1, 2, 3), suffix=0), given, torch.zeros(12)) == []
    assert select(RelayCaching(span=(1, 2, 3), suffix=1), given, torch.zeros(12)) == [11]


def test_thresholds_are_relative_to_each_segment(scene: Scene) -> None:
    """A segment that deviates much everywhere does not take the other's rows."""
    method = RelayCaching(span=(1, 2, 3), suffix=0, influence="none")
    plan = method.plan(scene.turn, scene.sources)
    event = next(e for e in plan.events if isinstance(e, Select))
    rows, start = scene.shared_rows(), scene.prompt.rows(OUT).start
    gap = torch.where(rows < start, 0.9, 0.01)
    gap[int((rows == start + 5).nonzero())] = 0.05
    old = torch.tensor([1.0, 0.0]).expand(1, len(rows), 2)
    new = torch.stack((1 - gap, (1 - (1 - gap) ** 2).sqrt()), dim=-1)[None]
    assert event.choose(Candidates(2, rows, old, new, old, old)).tolist() == [start + 5]


def test_received_attention_travels_with_the_source(scene: Scene) -> None:
    """A later consumer passes on what the producer's turn measured."""
    method = RelayCaching(span=(1, 2, 3), ratio=0.3)
    _, run = scene.serve(method)
    for i in (Q, OUT):
        received = scene.sources.caches[i].cache.received
        assert received is not None and received.min() > 0
        passed_on = run.buffer.extract(scene.prompt.rows(i)).received
        assert passed_on is not None and torch.equal(passed_on, received)


@pytest.mark.parametrize(
    ("rho", "layers", "span", "ratio"),
    [
        (0.9, 32, (8, 9, 23), 0.14667),
        (0.8, 32, (8, 9, 23), 0.36),
        (0.9, 28, (8, 9, 21), 0.13846),
        (0.8, 28, (8, 9, 21), 0.35385),
        (0.9, 10, (2, 3, 5), 0.0),
    ],
)
def test_budget(rho: float, layers: int, span: Span, ratio: float) -> None:
    assert RelayCaching.for_rho(rho, layers, span).ratio == pytest.approx(ratio, abs=1e-5)
    assert RelayCaching.for_rho(rho, layers, span, suffix=3).suffix == 3


def test_budget_out_of_reach() -> None:
    for rho in (0.9, 0.1):
        with pytest.raises(UserError, match="out of reach"):
            RelayCaching.for_rho(rho, 28, (4, 8, 20))


@pytest.mark.parametrize(
    "settings",
    [
        {"span": (2, 2, 3)},
        {"span": (3, 2, 4)},
        {"span": (-1, 2, 4)},
        {"span": (1, 3, 2)},
        {"span": (1, 2)},
        {"span": "mid"},
        {"ratio": 2},
        {"tau_dev": -1},
        {"tau_inf": "high"},
        {"suffix": -1},
        {"influence": True},
    ],
)
def test_illegal_settings(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        RelayCaching(**settings)  # type: ignore[arg-type]


def test_settings_from_json() -> None:
    assert RelayCaching(span=[1, 2, 3]).span == (1, 2, 3)  # type: ignore[arg-type]


def test_value_deviation() -> None:
    new = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[0.0, 0.0], [0.0, 2.0]]])
    old = torch.tensor([[[0.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 1.0]]])
    torch.testing.assert_close(value_deviation(new, old), torch.tensor([1.0, 0.0]))
    assert value_deviation(new.expand(5, 2, 2, 2), old.expand(5, 2, 2, 2)).shape == (5, 2)


def deviations(mean: list[float], like: dict[int, int] | None = None) -> torch.Tensor:
    """Layer means, with tokens ranked at random except where a layer is ranked like another."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(len(mean), 64, generator=generator)
    for layer, model in (like or {}).items():
        ranks[layer] = ranks[model]
    return (0.9 + 0.2 * ranks) * torch.tensor(mean)[:, None]


def test_choose_range_takes_the_middle() -> None:
    mean = [0, 1, 2, 6, 8, 9, 8, 6, 2, 1]
    start, detect, end = choose_range(deviations([float(m) for m in mean]))
    assert (start, end) == (3, 7) and 3 < detect <= 7


def test_choose_range_detects_where_later_layers_agree() -> None:
    mean = [0.0, 1, 8, 8, 8, 8, 8, 8, 1]
    like = {5: 4, 6: 4, 7: 4}
    assert choose_range(deviations(mean, like)) == (2, 4, 7)


def test_choose_range_respects_the_budget() -> None:
    mean = [0.0, *[8.0] * 29]
    like = dict.fromkeys(range(4, 30), 4)
    assert choose_range(deviations(mean, like)) == (1, 4, 29)
    span = choose_range(deviations(mean, like), rho=0.9)
    ratio = RelayCaching.for_rho(0.9, 30, span).ratio
    assert ratio is not None and ratio >= 0.05
    assert span[0] == 1 and span[1] <= 3
    with pytest.raises(UserError, match="no budget"):
        choose_range(deviations([0.0, 1, 1, 1]), rho=0.9)


@pytest.mark.parametrize(("rho", "step"), [(0.8, 1), (0.9, 3)])
def test_candidate_spans_can_realise_rho(rho: float, step: int) -> None:
    spans = candidate_spans(30, rho, step=step)
    ratios = [RelayCaching.for_rho(rho, 30, span).ratio for span in spans]
    assert all(ratio is not None and 0.05 <= ratio <= 1 for ratio in ratios)
    assert len(set(spans)) == len(spans) > 20
    assert all(start % step == 0 for start, _, _ in spans)
    assert candidate_spans(4, 0.9) == []


def test_choose_range_of_a_single_peak() -> None:
    assert choose_range(deviations([0.0, 1, 9, 1])) == (2, 3, 3)
    assert choose_range(deviations([0.0, 1, 1, 9])) == (2, 3, 3)
