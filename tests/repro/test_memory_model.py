"""The byte calculator against what real runs hold."""

from __future__ import annotations

import copy
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Method
from kvcmas.engine.session import Engine
from kvcmas.errors import UserError
from kvcmas.pool.anchors import BASE
from kvcmas.registry import make_method
from repro.models.published import PUBLISHED, figures
from repro.models.registry import get_entry
from repro.models.resolve import is_cached, resolve
from repro.runners.allocations import Allocations, storage_of
from repro.runners.memory_model import (
    active_bytes,
    layout_graph,
    layout_turns,
    memory_bytes,
    pool_bytes,
    reference_bytes,
    shapes_of,
    source_bytes,
    transient_bytes,
)
from repro.runners.replay import replay
from traces import GeneratorSettings, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TRACE = generate(GeneratorSettings(vocab=200, scale=64, workflows=3))
TURNS = shapes_of(TRACE[0])
LONG = generate(GeneratorSettings(vocab=200, layout="L0", shared=300, output=2, agents=2))

CASES: list[tuple[str, dict[str, Any]]] = [
    ("nonshared", {}),
    ("fullshared", {}),
    ("droidspeak", {"blocks": ((1, 2),)}),
    ("cacheblend", {}),
    ("relaycaching", {"span": (1, 2, 3), "ratio": 0.5}),
    ("epic", {}),
    ("kvcmas", {"capacity": 2}),
    ("kvcmas", {"capacity": 2, "capacity_rule": "authors", "rank_base": 4, "rank_delta": 3}),
    ("kvcmas", {"capacity": 2, "base": "shared", "rank_base": None, "rank_delta": None}),
    ("kvcmas", {"capacity": 2, "chained": False}),
    ("kvcmas", {"capacity": 2, "chained": False, "first_turn": "dense"}),
    ("kvcmas", {"capacity": 1, "chained": False, "reference": "background"}),
    ("kvcomm", {"capacity": 2}),
    ("kvcomm", {"capacity": 2, "capacity_rule": "authors", "first_turn": "dense"}),
    ("graphflow", {"n_cal": 9}),
    ("graphflow", {"n_cal": 9, "first_turn": "dense"}),
]


@pytest.fixture(scope="module")
def adapter(tiny_llama: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> TransformersAdapter:
    return TransformersAdapter(tiny_llama[0])


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_category_is_what_a_run_holds(
    adapter: TransformersAdapter, name: str, settings: dict[str, Any]
) -> None:
    method = make_method(name, settings)
    engine = Engine(adapter, method, reference_prefix=(1,))
    for workflow in TRACE:
        results = list(replay(engine, workflow, "fully_connected", accept=False, keep_buffers=True))
    assert [r.source_bytes for r in results] == source_bytes(method, TURNS, adapter.spec)
    assert [r.reference_bytes for r in results] == reference_bytes(method, TURNS, adapter.spec)
    buffers = [r.buffer for r in results if r.buffer is not None]
    captured = [sum(h.nbytes for h in buffer.hidden.values()) for buffer in buffers]
    held = [b.nbytes + h for b, h in zip(buffers, captured, strict=True)]
    assert max(held) == active_bytes(method, TURNS, adapter.spec)

    pool = pool_bytes(method, TURNS, adapter.spec)
    state = method.state()
    assert pool.total == state.nbytes
    if hasattr(method, "pool"):
        parts = [item for _, anchor in method.pool for item in anchor.parts.items()]
        assert pool.base == sum(p.nbytes for key, p in parts if key.startswith(BASE))
        assert pool.delta == sum(p.nbytes for key, p in parts if not key.startswith(BASE))
    whole = memory_bytes(method, TURNS, adapter.spec, 7)
    assert whole.held == 7 + whole.active + whole.sources + pool.total + whole.references


def _stored(method: Method) -> int:
    """Bytes of the storages behind a pool; a delta's view keeps layer 0 too."""
    tensors = (t for entry in method.state().entries.values() for t in entry.values())
    return sum({storage_of(t): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kvcmas", {}),
        ("kvcmas", {"rank_base": None, "rank_delta": 8}),
        ("kvcmas", {"rank_base": 16, "rank_delta": None}),
        ("kvcmas", {"factorisation": "randomised"}),
        ("kvcmas", {"chained": False}),
        ("kvcomm", {}),
        ("graphflow", {}),
    ],
)
def test_building_an_anchor_holds_what_is_said(
    tiny_llama: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    name: str,
    settings: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    model = copy.deepcopy(tiny_llama[0])
    model.to(dtype=dtype)  # type: ignore[call-arg]
    adapter = TransformersAdapter(model)
    method = make_method(name, settings)
    engine = Engine(adapter, method)
    session = engine.session(LONG[0].workflow("loop"), "it")
    first, second = LONG[0].turns
    session.run(first.node, first.prompt, max_new_tokens=2, output=first.output, force={1: False})
    before = _stored(method)
    with torch.inference_mode():
        opened = session.open(second.node, second.prompt, {1: False})
        buffer = engine.executor.run(second.prompt, opened.plan).buffer
        gc.collect()
        with Allocations() as made:
            session.learn(opened, buffer)
    left = _stored(method) - before
    said = transient_bytes(method, shapes_of(LONG[0]), adapter.spec)
    # Up to a few vectors: angles, which rows are exact.
    assert said <= made.peak <= said + left + 4096


def test_layouts_give_the_lengths_of_generated_traces() -> None:
    for layout in ("T", "L0"):
        settings = GeneratorSettings(vocab=9, layout=layout, shared=300, output=7, agents=3)
        turns = layout_turns(settings.lengths, layout_graph(layout, 3, 1))
        assert turns == shapes_of(generate(settings)[0])
        assert max(turn.rows for turn in turns) == settings.positions


def test_later_rounds_read_the_round_before(adapter: TransformersAdapter) -> None:
    lengths = GeneratorSettings(vocab=9, shared=40, output=8).lengths
    turns = layout_turns(lengths, layout_graph("T", 2, 2))
    assert [turn.out_slot for turn in turns] == ["out0", "out1", "out0@2", "out1@2"]
    assert [name for name, _ in turns[2].shared] == ["q", "out0", "out1"]
    one = pool_bytes(make_method("kvcmas"), turns[:2], adapter.spec)
    two = pool_bytes(make_method("kvcmas"), turns, adapter.spec)
    assert two.base > one.base and two.delta > one.delta
    with pytest.raises(UserError, match="agents=0"):
        layout_graph("T", 0, 1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kvcmas", {"pf_policy": "rotate"}),
        ("kvcomm", {"base": "producer"}),
        ("kvcomm", {"prefixes": "offset", "gate_scope": "prompt"}),
    ],
)
def test_what_is_not_counted_is_one_clear_line(
    adapter: TransformersAdapter, name: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match="not counted"):
        memory_bytes(make_method(name, settings), TURNS, adapter.spec, 0)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_figures_of_a_directory_are_those_of_the_loaded_model(
    name: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name.replace("-", "_"))[0]
    found = figures(name)
    assert found.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert found.spec.kv_bytes_per_token == TransformersAdapter(model).spec.kv_bytes_per_token
    assert figures(name, "bfloat16").weight_bytes * 2 == found.weight_bytes


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248, 131_072),
        ("qwen2.5-coder-7b", 7_615_616_512, 57_344),
    ],
)
def test_the_papers_models_have_their_published_size(
    name: str, parameters: int, kv_bytes: int
) -> None:
    found = figures(name)
    assert found.parameters == parameters
    assert found.spec.kv_bytes_per_token == kv_bytes
    assert found.weight_bytes == 2 * parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_stored_models_are_as_published(name: str) -> None:
    """Where a model is at hand its own configuration decides."""
    entry = get_entry(name)
    if not is_cached(entry):
        pytest.skip(f"{name} is not stored here")
    assert vars(figures(str(resolve(name).path)).spec) == vars(figures(name).spec)
