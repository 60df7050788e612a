"""Invariants that hold for every selective method, whatever part it rebuilds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
import torch

from baselines.cacheblend import CacheBlend
from baselines.droidspeak import DroidSpeak
from baselines.epic import EPIC
from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from baselines.relaycaching import RelayCaching
from baselines.selective import Selective
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Enter
from kvcmas.engine.executor import Executor
from kvcmas.engine.session import Engine
from kvcmas.engine.workflow import fully_connected
from kvcmas.errors import UserError
from tests.baselines.scenes import (
    LAYERS,
    OUT,
    Q,
    Scene,
    assert_same_kv,
    executed,
    make_scene,
)
from tests.workflows import play, random_ids

NOTHING = [DroidSpeak(), CacheBlend(ratio=0), RelayCaching(), EPIC(tokens=0)]
EVERYTHING = [
    DroidSpeak(blocks=((0, 3),)),
    CacheBlend(ratio=1),
    CacheBlend(ratio=1, write_back="full", scope="segment"),
    CacheBlend(ratio=1, check_layer=2, deviation="key"),
    CacheBlend(ratio=1, gradual=True),
    RelayCaching(span=(0, 1, 3), ratio=1),
    RelayCaching(span=(0, 2, 3), tau_dev=0),
    EPIC(tokens=100),
]
PART = [
    DroidSpeak(blocks=((1, 2),)),
    DroidSpeak(blocks=((0, 0), (2, 3))),
    CacheBlend(ratio=0.3, scope="segment"),
    CacheBlend(ratio=0.3, scope="segment", deviation="key", write_back="full"),
    CacheBlend(ratio=0.4, scope="segment", check_layer=2),
    CacheBlend(ratio=0.4, scope="segment", gradual=True),
    RelayCaching(span=(1, 2, 3), suffix=2),
    RelayCaching(span=(1, 2, 2), suffix=2, ratio=0.4),
    RelayCaching(span=(0, 2, 3), ratio=0.4, influence="none"),
    RelayCaching(span=(1, 2, 3), ratio=0.4, influence="all"),
    EPIC(tokens=4),
]
# Each ladder rebuilds more and more, from nothing to everything.
LADDERS: dict[str, list[Selective]] = {
    "droidspeak": [DroidSpeak(), *(DroidSpeak(blocks=((0, last),)) for last in range(1, LAYERS))],
    "cacheblend": [CacheBlend(ratio=r, scope="segment") for r in (0, 0.25, 0.5, 0.75, 1)],
    "relaycaching": [
        RelayCaching(),
        *(RelayCaching(span=(0, 1, 3), ratio=r) for r in (0.25, 0.5, 0.75, 1)),
    ],
    "epic": [EPIC(tokens=k) for k in (0, 4, 8, 16, 24)],
}


def label(method: Selective) -> str:
    default = type(method)().settings()
    changed = [f"{k}={v}" for k, v in method.settings().items() if v != default[k]]
    return " ".join((method.name, *changed))


def methods(which: list[Selective]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("method", which, ids=label)


@pytest.fixture(scope="module")
def scene(executor: Executor) -> Scene:
    return make_scene(executor)


@pytest.fixture(scope="module")
def long(executor: Executor) -> Scene:
    return make_scene(executor, query=120, output=60)


@pytest.fixture(scope="module")
def full_hit(executor: Executor) -> Scene:
    return make_scene(executor, tail=0)


@methods(EVERYTHING)
def test_full_budget_is_dense(method: Selective, scene: Scene) -> None:
    _, run = scene.serve(method)
    assert_same_kv(run.buffer, scene.dense.buffer)
    torch.testing.assert_close(run.logits, scene.dense.logits, atol=1e-4, rtol=0)


@methods(EVERYTHING)
def test_full_budget_is_dense_on_a_full_hit(method: Selective, full_hit: Scene) -> None:
    _, run = full_hit.serve(method)
    assert_same_kv(run.buffer, full_hit.dense.buffer)
    torch.testing.assert_close(run.logits, full_hit.dense.logits, atol=1e-4, rtol=0)


@methods(NOTHING)
def test_empty_budget_is_fullshared(method: Selective, scene: Scene) -> None:
    _, run = scene.serve(method)
    _, plain = scene.serve(FullShared())
    assert_same_kv(run.buffer, plain.buffer)
    assert run.accounting.shared == plain.accounting.shared
    assert scene.error(plain) > 0.01


@methods([*NOTHING, *PART, *EVERYTHING])
def test_same_context_is_dense(method: Selective, executor: Executor) -> None:
    scene = make_scene(executor, same_context=True)
    _, run = scene.serve(method)
    assert_same_kv(run.buffer, scene.dense.buffer)
    torch.testing.assert_close(run.logits, scene.dense.logits, atol=1e-4, rtol=0)


@methods(PART)
def test_later_keys_do_not_reach_earlier_rows(method: Selective, long: Scene) -> None:
    """Long enough that scattered rows are masked together, not run by run."""
    scene, cache = long, long.sources.caches[OUT].cache
    other = replace(cache, k=cache.k + 1, v=cache.v - 1)
    _, run = scene.serve(method)
    _, perturbed = scene.with_cache(OUT, other).serve(method)
    before = scene.prompt.starts[OUT]
    torch.testing.assert_close(perturbed.buffer.v[:, :, :before], run.buffer.v[:, :, :before])
    torch.testing.assert_close(perturbed.buffer.k[:, :, :before], run.buffer.k[:, :, :before])
    assert not torch.allclose(perturbed.logits, run.logits, atol=1e-2)


@methods([*NOTHING, *PART, *EVERYTHING])
def test_counted_entries_are_those_that_survive(method: Selective, scene: Scene) -> None:
    """Brute force: with noise for source values, what still equals its source was reused."""
    noise = torch.Generator().manual_seed(1)
    for i in (Q, OUT):
        cache = scene.sources.caches[i].cache
        scene = scene.with_cache(
            i, replace(cache, v=torch.randn(cache.v.shape, generator=noise), k=cache.k)
        )
    plan, run = scene.serve(method)
    for fill in plan.fills:
        rows = scene.prompt.rows(fill.segment)
        held = run.buffer.v[:, :, rows.start : rows.stop]
        survived = (held == fill.cache.v).all(dim=3).all(dim=1)
        entries = run.accounting.shared[fill.segment]
        assert entries.reused == int(survived.sum())
        assert entries.reused + entries.executed == entries.total == LAYERS * len(rows)
        assert torch.equal(survived, ~executed(run.buffer)[:, rows.start : rows.stop])


@methods(PART)
def test_a_reused_entry_changes_the_logits(method: Selective, scene: Scene) -> None:
    _, run = scene.serve(method)
    rows = scene.prompt.rows(Q)
    layer, row = (~executed(run.buffer)[1:, rows.start : rows.stop]).nonzero()[0].tolist()
    cache = scene.sources.caches[Q].cache
    other = cache.v.clone()
    other[layer + 1, :, row] += 1
    _, bitten = scene.with_cache(Q, replace(cache, v=other)).serve(method)
    assert float((bitten.logits - run.logits).abs().max()) > 1e-3


@methods([*NOTHING, *PART])
def test_layer_0_is_exact_and_last_row_is_executed(method: Selective, full_hit: Scene) -> None:
    _, run = full_hit.serve(method)
    for got, exact in (
        (run.buffer.k, full_hit.dense.buffer.k),
        (run.buffer.v, full_hit.dense.buffer.v),
    ):
        torch.testing.assert_close(got[0], exact[0], atol=2e-5, rtol=0)
    assert executed(run.buffer)[:, -1].all()
    assert run.logits.isfinite().all()


@methods([*NOTHING, *PART])
def test_single_shared_token_at_the_end(method: Selective, executor: Executor) -> None:
    scene = make_scene(executor, output=1, tail=0)
    _, run = scene.serve(method)
    assert run.logits.isfinite().all()
    assert run.accounting.shared[OUT].executed == LAYERS


@methods(PART)
def test_forced_segment_is_dense(method: Selective, scene: Scene) -> None:
    forced = scene.forced({Q: False, OUT: True})
    plan, run = forced.serve(method)
    assert [(d.action, d.reason == "forced") for d in plan.decisions] == [
        ("dense", True),
        ("recompute", False),
    ]
    assert run.accounting.shared[Q].reused == 0 < run.accounting.shared[OUT].reused


@methods(PART)
def test_schedule_moves_with_the_segments(method: Selective, executor: Executor) -> None:
    """A longer first PF shifts every row by as much and leaves the canonical source alone."""
    near, far = make_scene(executor, system=14), make_scene(executor, system=37)
    far = replace(far, sources=near.sources)
    entered = []
    for scene in (near, far):
        plan, run = scene.serve(method)
        start = scene.prompt.starts[Q]
        entered.append(
            [
                (type(event), event.layer, (event.rows - start).tolist())
                for event in plan.events
                if not (isinstance(event, Enter) and event.layer == 0 and event.write)
            ]
        )
        for fill in plan.fills:
            rows = scene.prompt.rows(fill.segment)
            kept = ~executed(run.buffer)[:, rows.start : rows.stop]
            got = run.buffer.extract(rows)
            for tensor, source in ((got.k, fill.cache.k), (got.v, fill.cache.v)):
                torch.testing.assert_close(
                    tensor.transpose(1, 2)[kept],
                    source.transpose(1, 2)[kept],
                    atol=2e-5,
                    rtol=0,
                )
    assert entered[0] == entered[1]


@pytest.mark.parametrize("name", LADDERS)
def test_error_falls_with_the_budget(name: str, executor: Executor) -> None:
    scenes = [make_scene(executor, seed) for seed in range(1, 7)]
    errors = [mean(s.error(s.serve(method)[1]) for s in scenes) for method in LADDERS[name]]
    assert all(more < less for less, more in pairwise(errors)), errors
    assert errors[0] > 0.05 and errors[-1] < 1e-5


@methods(PART)
def test_workflow_chain(method: Selective, executor: Executor) -> None:
    """Four agents: the first is exact, later ones reuse, and the same run gives the same result."""
    query = random_ids(5, 20)
    truth = play(Engine(executor.model, NonShared()), fully_connected(4), "r0", query)
    outputs = {node: result.output for node, result in truth.items()}
    runs = [
        play(Engine(executor.model, method), fully_connected(4), "r0", query, outputs=outputs)
        for _ in range(2)
    ]
    assert torch.equal(runs[0]["A0"].first_logits, truth["A0"].first_logits)
    for node, result in runs[0].items():
        assert torch.equal(result.first_logits, runs[1][node].first_logits)
        assert result.first_logits.isfinite().all()
        actions = {d.action for d in result.decisions}
        assert actions == ({"dense"} if node == "A0" else {"recompute"})
        if node != "A0":
            assert all(0 < e.reused < e.total for e in result.accounting.shared.values())


@methods(PART)
def test_with_prefixes_from_the_store(method: Selective, executor: Executor) -> None:
    """From the second request on PF rows are served, too; the rebuilt part stays the same."""
    engine = Engine(executor.model, replace(method, pf_policy="rotate"))
    first, second = (
        play(engine, fully_connected(3), request, random_ids(5, 20)) for request in ("r0", "r1")
    )
    for node in ("A1", "A2"):
        before, after = first[node].accounting, second[node].accounting
        assert before.prompt.prefix_hit == 0 and second[node].first_logits.isfinite().all()
        assert after.row_layers < before.row_layers
        if not (isinstance(method, RelayCaching) and method.ratio is None):
            assert after.shared[Q].executed == before.shared[Q].executed


def test_missing_residual_rows_are_named(scene: Scene) -> None:
    cache = scene.sources.caches[Q].cache
    bare = scene.with_cache(Q, SegmentCache(cache.k, cache.v))
    for method in (DroidSpeak(blocks=((2, 3),)), RelayCaching(span=(2, 3, 3))):
        with pytest.raises(ValueError, match="no residual rows of layer 2"):
            method.plan(bare.turn, bare.sources)


@methods(
    [DroidSpeak(blocks=((3, 4),)), CacheBlend(check_layer=4), RelayCaching(span=(1, 2, 4))],
)
def test_layers_the_model_lacks(method: Selective, scene: Scene) -> None:
    with pytest.raises(UserError, match="layer 4 does not exist; the model's last layer is 3"):
        method.plan(scene.turn, scene.sources)
