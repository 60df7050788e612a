from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from baselines.droidspeak import (
    Block,
    DroidSpeak,
    candidate_blocks,
    choose_block,
    layer_errors,
)
from baselines.fullshared import FullShared
from baselines.selective import search
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.executor import Executor
from kvcmas.errors import UserError
from tests.baselines.scenes import (
    CLOSE,
    LAYERS,
    OUT,
    Q,
    Scene,
    assert_same_kv,
    executed,
    make_scene,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def scene(executor: Executor) -> Scene:
    return make_scene(executor)


@pytest.mark.parametrize("first", [1, 2])
def test_exact_entry_makes_the_block_exact(first: int, scene: Scene) -> None:
    """The target's own residual rows, exact K and V below the block and garbage from there on."""
    last = LAYERS - 1
    for i in (Q, OUT):
        exact = scene.dense.buffer.extract(scene.prompt.rows(i))
        source = scene.sources.caches[i].cache
        k, v = exact.k.clone(), exact.v.clone()
        k[first:], v[first:] = source.k[first:] + 1, source.v[first:] - 1
        scene = scene.with_cache(i, SegmentCache(k, v, {first: exact.residual(first)}))
    _, run = scene.serve(DroidSpeak(blocks=((first, last),)))
    assert_same_kv(run.buffer, scene.dense.buffer)


def test_stale_entry_still_helps(executor: Executor) -> None:
    """Without layer 0 the entry is the source's residual row: error remains, below FullShared."""
    scenes = [make_scene(executor, seed) for seed in range(1, 9)]
    method = DroidSpeak(blocks=((1, LAYERS - 1),))
    stale = [s.error(s.serve(method)[1]) for s in scenes]
    plain = [s.error(s.serve(FullShared())[1]) for s in scenes]
    assert 0.01 < sum(stale) < sum(plain)


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_entry_layer_gives_back_the_source(layer: int, scene: Scene) -> None:
    """Same weights, same residual rows: a block of one layer is FullShared at a price."""
    _, run = scene.serve(DroidSpeak(blocks=((layer, layer),)))
    _, plain = scene.serve(FullShared())
    assert_same_kv(run.buffer, plain.buffer)
    assert run.accounting.row_layers - plain.accounting.row_layers == len(scene.shared_rows())


@pytest.mark.parametrize("blocks", [((1, 2),), ((0, 1),), ((0, 0), (2, 3)), ((3, 3),)])
def test_rho_and_work_follow_from_the_blocks(blocks: tuple[Block, ...], scene: Scene) -> None:
    _, run = scene.serve(DroidSpeak(blocks=blocks))
    rows, rebuilt = scene.shared_rows(), sum(last - first + 1 for first, last in blocks)
    expected = torch.zeros(LAYERS, len(rows), dtype=torch.bool)
    for first, last in blocks:
        expected[first : last + 1] = True
    assert torch.equal(executed(run.buffer)[:, rows], expected)
    entries = run.accounting.shared.values()
    rho = 1 - sum(e.executed for e in entries) / sum(e.total for e in entries)
    assert rho == 1 - rebuilt / LAYERS
    _, plain = scene.serve(FullShared())
    extra = run.accounting.row_layers - plain.accounting.row_layers
    assert extra == rebuilt * len(rows)
    assert run.accounting.touched_rows == len(rows)


def test_last_layer_of_a_block_needs_only_keys_and_values(scene: Scene) -> None:
    """Leaving after layer 2 is cheaper than staying active in layer 3 by more than layer 3's K, V.

    In layer 3 the rows run K and V only (nothing follows), so the block 1-3 pays the attention and
    MLP of layer 2 on top.
    """
    spec = scene.executor.model.spec
    flops = [scene.serve(DroidSpeak(blocks=((1, last),)))[1].accounting.flops for last in (1, 2, 3)]
    rows = len(scene.shared_rows())
    attended = int(scene.shared_rows().sum()) + rows
    whole_layer = spec.layer_flops(rows, rows, attended)
    assert flops[1] - flops[0] == flops[2] - flops[1] == whole_layer
    _, plain = scene.serve(FullShared())
    assert flops[0] - plain.accounting.flops == spec.layer_flops(rows, 0, 0)


def test_residual_rows_are_captured_in_prefill_and_decode(
    scene: Scene, model: PreTrainedModel
) -> None:
    """Against Transformers' own hidden states: prefill in one run, decode token by token."""
    rows, output = scene.source.rows(1), scene.prompt.segments[OUT].ids
    with torch.no_grad():
        ids = torch.tensor([[*scene.source.ids, *output]])
        states = model(ids, output_hidden_states=True).hidden_states
    for layer in range(LAYERS):
        expected = {
            Q: states[layer][0, rows.start : rows.stop],
            OUT: states[layer][0, -len(output) :],
        }
        for i, held in scene.sources.caches.items():
            got = held.cache.residual(layer)
            torch.testing.assert_close(got, expected[i], atol=1e-4, rtol=0)


def test_entry_is_relayed_along_the_chain(scene: Scene) -> None:
    """Rows that skip the entry layer, and rows that enter there, pass the producer's rows on."""
    for blocks in ((), ((2, 3),)):
        method = DroidSpeak(blocks=blocks)
        plan = method.plan(scene.turn, scene.sources)
        run = scene.executor.run(scene.prompt, plan, hidden_layers=(2,))
        for i in (Q, OUT):
            passed_on = run.buffer.extract(scene.prompt.rows(i)).residual(2)
            assert torch.equal(passed_on, scene.sources.caches[i].cache.residual(2))


def test_residual_rows_of_first_seen_ph_are_kept(scene: Scene) -> None:
    """One PH is held, the other new: the new one is dense and leaves its own residual rows."""
    sources = replace(scene.sources, caches={Q: scene.sources.caches[Q]})
    scene = replace(scene, sources=sources)
    plan = DroidSpeak(blocks=((0, 3),)).plan(scene.turn, sources)
    assert [(d.action, d.reason) for d in plan.decisions] == [
        ("recompute", "layer block"),
        ("dense", "first"),
    ]
    run = scene.executor.run(scene.prompt, plan, hidden_layers=(2,))
    rows = scene.prompt.rows(OUT)
    torch.testing.assert_close(
        run.buffer.extract(rows).residual(2),
        scene.dense.buffer.extract(rows).residual(2),
        atol=CLOSE,
        rtol=0,
    )


def test_budget() -> None:
    def middle(size: int) -> Block:
        return (10, 9 + size)

    for rho, layers, size in ((0.9, 32, 3), (0.8, 32, 6), (0.9, 28, 3), (0.8, 28, 6)):
        method = DroidSpeak.for_rho(rho, layers, middle)
        assert method.blocks == ((10, 9 + size),)
    assert DroidSpeak.for_rho(1, 32, middle) == DroidSpeak()
    assert DroidSpeak(blocks=((1, 2), (4, 4))).wants.hidden_layers == (1, 4)
    assert DroidSpeak(blocks=((0, 2),)).wants.hidden_layers == ()


def test_settings_from_json() -> None:
    assert DroidSpeak(blocks=[[1, 2], [5, 6]]).blocks == ((1, 2), (5, 6))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "blocks",
    [
        ((2, 1),),
        ((-1, 2),),
        ((1, 2), (2, 3)),
        ((1, 2), (3, 4)),
        ((4, 5), (1, 2)),
        (3,),
        ((1, 2.5),),
    ],
)
def test_illegal_blocks(blocks: object) -> None:
    with pytest.raises(UserError, match="blocks="):
        DroidSpeak(blocks=blocks)  # type: ignore[arg-type]


def test_layer_errors() -> None:
    k, v = torch.ones(3, 2, 5, 4), torch.ones(3, 2, 5, 4)
    source = SegmentCache(k.clone(), v.clone())
    source.k[1] *= 1.5
    source.v[2] *= 0.8
    errors = layer_errors(SegmentCache(k, v), source)
    torch.testing.assert_close(errors, torch.tensor([0.0, 0.25, 0.1]))


def test_choose_block() -> None:
    errors = [0, 1, 1, 5, 4, 5, 1, 9]
    assert choose_block(errors, 1) == (7, 7)
    assert choose_block(errors, 2) == (6, 7)
    assert choose_block(errors, 3) == (5, 7)
    assert choose_block([0, 2, 2, 2], 2) == (1, 2)
    assert choose_block([9, 1, 1, 1], 2) == (1, 2)
    assert choose_block([9, 1, 1, 1], 2, first=0) == (0, 1)
    assert choose_block([1, 1], 2) == (0, 1)
    with pytest.raises(UserError, match="does not fit"):
        choose_block(errors, 9)


def test_candidate_blocks() -> None:
    assert candidate_blocks(4, 2) == [(1, 2), (2, 3)]
    assert candidate_blocks(4, 2, first=0) == [(0, 1), (1, 2), (2, 3)]
    assert candidate_blocks(8, 3, step=2) == [(1, 3), (3, 5), (5, 7)]


def test_search_runs_every_candidate() -> None:
    remaining = {(1, 3): 0.5, (3, 5): 0.2, (5, 7): 0.2}
    assert search(candidate_blocks(8, 3, step=2), remaining.__getitem__) == ((3, 5), remaining)


def test_closed_loop_on_the_model(executor: Executor) -> None:
    """The chosen block leaves no more error than the one that the criterion picks."""
    scenes = [make_scene(executor, seed) for seed in range(1, 4)]

    def run(block: Block) -> float:
        return sum(s.error(s.serve(DroidSpeak(blocks=(block,)))[1]) for s in scenes)

    block, errors = search(candidate_blocks(LAYERS, 2, first=0), run)
    assert len(errors) == 3
    per_layer = torch.stack(
        [
            layer_errors(s.dense.buffer.extract(s.prompt.rows(i)), held.cache)
            for s in scenes
            for i, held in s.sources.caches.items()
        ]
    ).mean(dim=0)
    assert per_layer[0] < CLOSE
    assert errors[block] <= errors[choose_block(per_layer.tolist(), 2)]
