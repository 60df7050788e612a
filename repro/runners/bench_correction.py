"""`repro bench correction`: one segment's correction beside its dense prefill (layout L0)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import ContiguousBuffer
from kvcmas.engine.contract import Edge, Plan, Turn
from kvcmas.engine.executor import Executor, write_fill
from kvcmas.engine.rope import Rope
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.method.kvcmas import KVCMAS
from repro.models.published import PUBLISHED
from repro.runners.allocations import Allocations
from repro.runners.bench_parts import (
    AFTER,
    BEFORE,
    Clock,
    Draw,
    KVShape,
    RandomSources,
    Step,
    exponents,
    interleaved,
)
from results.goals import BenchRow

# The paper's model, of which this many layers with random weights are timed.
WIDE, WIDE_LAYERS = "llama-3.1-8b", 2
# Layers of the model's own KV shape on which the exponents are fitted.
FITTED_LAYERS = 4


@dataclass(frozen=True)
class Correction:
    """A KVCMAS correction of one segment, with everything that it reads and writes."""

    shape: KVShape
    method: KVCMAS
    turn: Turn
    sources: RandomSources
    buffer: ContiguousBuffer

    @classmethod
    def random(
        cls, shape: KVShape, rope: Rope, tokens: int, anchors: int, rank: int, draw: Draw
    ) -> Correction:
        """Random caches and anchors of these sizes; the gate compares, and accepts all."""
        method = KVCMAS(tau=1.0, capacity=anchors, rank_base=rank, rank_delta=rank)
        ids = draw.ids(2, tokens)
        prompt = Prompt((pf(ids[:1] * BEFORE), ph("q", ids), pf(ids[:1] * AFTER)))
        turn = Turn("request", "A2", 1, prompt)
        draw.anchors(method, shape, {Edge("q", "A1", "A2"): tokens}, anchors)
        size = (shape.layers, shape.kv_heads, len(prompt), shape.head_dim)
        buffer = ContiguousBuffer(size, len(prompt), rope, shape.dtype, shape.device)
        return cls(shape, method, turn, draw.sources(shape, prompt, {1: "A1"}), buffer)

    @property
    def moved_bytes(self) -> int:
        """Bytes that cannot be avoided: source and anchors read once, the target written once."""
        held = self.sources.by_segment[1].cache.nbytes
        return 2 * held + self.method.pool.nbytes

    def plan(self) -> Plan:
        """Gate and weights."""
        return self.method.plan(self.turn, self.sources)

    def write(self, plan: Plan, layers: Sequence[int]) -> None:
        """Correction, rotation and write of these layers."""
        for layer in layers:
            for fill in plan.fills:
                write_fill(self.buffer, self.turn.prompt.rows(fill.segment), fill, layer)

    def run(self) -> None:
        """All of it."""
        self.write(self.plan(), range(self.shape.layers))


@torch.inference_mode()
def bench_correction(
    model: PreTrainedModel,
    *,
    shared: int,
    anchors: int = 10,
    rank: int = 32,
    wide_shared: int = 1024,
    repeats: int = 3,
    seed: int = 0,
    on_step: Step = lambda step: None,
) -> tuple[BenchRow, ...]:
    """Time a correction against the dense prefill of the same tokens, in turn.

    Gate, weights, correction, rotation and write all count. ``wide_shared`` tokens are timed with
    the KV shape of Llama-3.1-8B; with 0 they are not.

    Raises:
        UserError: the context is longer than the model allows.
    """
    draw, executor = Draw(seed), Executor(TransformersAdapter(model))
    shape, rope = KVShape.of(executor.model.spec), executor.model.rope
    on_step("drawing anchors")
    one = Correction.random(shape, rope, shared, anchors, rank, draw)
    rows = _measured(one, executor, draw.ids(executor.model.spec.vocab, shared), repeats, on_step)
    del one
    if wide_shared:
        rows.append(_wide(wide_shared, anchors, rank, repeats, draw, on_step))
    return (*rows, *_exponents(shape, rope, shared, repeats, draw, on_step))


def _measured(
    one: Correction, executor: Executor, ids: tuple[int, ...], repeats: int, on_step: Step
) -> list[BenchRow]:
    """The correction beside the dense prefill of ``ids`` and a copy of as many bytes."""
    shape, clock = one.shape, Clock(one.shape.device)
    prompt = Prompt((pf(ids),))
    half = torch.ones(one.moved_bytes // 2, dtype=torch.uint8, device=shape.device)
    copied = torch.empty_like(half)
    planned: list[float] = []

    def correct() -> float:
        start = clock.now()
        plan = one.plan()
        planned.append(clock.now() - start)
        one.write(plan, range(shape.layers))
        return clock.now() - start

    parts = {
        "correction": correct,
        "dense prefill": lambda: clock.time(lambda: executor.run(prompt, Plan.make(prompt))),
        "memcpy": lambda: clock.time(lambda: copied.copy_(half)),
    }
    seconds = interleaved(parts, repeats, on_step)
    corrected, dense = seconds["correction"], seconds["dense prefill"]
    share = f"correction / dense prefill, D={shape.width}, {len(ids)} tokens"
    temporary = (_largest_temporary(one),)
    return [
        BenchRow.paired(share, corrected, dense, 0.08),
        BenchRow.paired("of it gate and weights", planned[1:], corrected),
        BenchRow.paired("memcpy of the same bytes / correction", seconds["memcpy"], corrected),
        BenchRow(
            name="bytes moved, GB/s", values=tuple(one.moved_bytes / s / 1e9 for s in corrected)
        ),
        BenchRow(name="largest temporary / K,V of one layer", values=temporary, goal=1.0),
    ]


def _largest_temporary(one: Correction) -> float:
    with Allocations() as made:
        one.run()
    return made.largest / one.shape.layer_bytes(len(one.turn.prompt.segments[1]))


def _wide(
    tokens: int, anchors: int, rank: int, repeats: int, draw: Draw, on_step: Step
) -> BenchRow:
    """The same with the KV shape of Llama-3.1-8B, per layer that is corrected and executed."""
    on_step("making layers of the 8B shape")
    published = {k: v for k, v in PUBLISHED[WIDE].items() if k != "model_type"}
    config = LlamaConfig(**{**published, "num_hidden_layers": WIDE_LAYERS, "vocab_size": 64})
    executor = Executor(TransformersAdapter(LlamaForCausalLM(config).eval()))
    shape = KVShape.of(executor.model.spec)
    one = Correction.random(shape, executor.model.rope, tokens, anchors, rank, draw)
    prompt = Prompt((pf(draw.ids(64, tokens)),))
    clock = Clock(shape.device)

    def correct() -> float:
        start = clock.now()
        plan = one.plan()
        planned = clock.now()
        one.write(plan, range(1, shape.layers))
        return (planned - start) / shape.layers + (clock.now() - planned) / (shape.layers - 1)

    def dense() -> float:
        # Without all logits the last layer would execute one row only.
        run = functools.partial(executor.run, prompt, Plan.make(prompt), all_logits=True)
        return clock.time(run) / shape.layers

    seconds = interleaved({"correction, 8B": correct, "dense, 8B": dense}, repeats, on_step)
    return BenchRow.paired(
        f"correction / dense prefill per layer, D={shape.width}, {tokens} tokens",
        seconds["correction, 8B"],
        seconds["dense, 8B"],
    )


def _exponents(
    shape: KVShape, rope: Rope, shared: int, repeats: int, draw: Draw, on_step: Step
) -> Iterator[BenchRow]:
    """How the time grows in S, V and r, each with the other two at a middle size."""
    small = replace(shape, layers=min(FITTED_LAYERS, shape.layers))
    clock = Clock(shape.device)
    tokens = max(8, shared // 4)
    cases = {
        "S": [(size, (size, 5, 32)) for size in (tokens // 2, tokens, 2 * tokens, 4 * tokens)],
        "V": [(size, (tokens, size, 32)) for size in (5, 10, 20)],
        "r": [(size, (tokens, 10, size)) for size in (16, 32, 64) if size <= shape.width],
    }
    for name, sizes in cases.items():
        made = [Correction.random(small, rope, *case, draw) for _, case in sizes]
        parts = {
            f"{name}={size}": functools.partial(clock.time, one.run)
            for (size, _), one in zip(sizes, made, strict=True)
        }
        seconds = interleaved(parts, max(repeats, 3), on_step)
        fitted = exponents([size for size, _ in sizes], list(seconds.values()))
        yield BenchRow(name=f"exponent of the time in {name}", values=fitted, goal=1.1)
