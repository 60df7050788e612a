"""`repro bench turn` and `repro bench anchors`: what a turn of KVCMAS costs beside a dense one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import Buffer
from kvcmas.engine.contract import Edge, Fill, Method, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.prefixes import with_fills
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.errors import UserError
from kvcmas.method.kvcmas import KVCMAS
from repro.runners.bench_parts import (
    AFTER,
    BEFORE,
    Clock,
    Draw,
    KVShape,
    RandomSources,
    Step,
    interleaved,
)
from results.goals import BenchRow
from traces.generator import GeneratorSettings, Seeds, generate

# An accepted turn at 32K may cost this share of NonShared's, and this much of FullShared's.
TURN_GOALS: Mapping[int, float] = {32_768: 0.08}
FULLSHARED_GOAL = 1.5


@dataclass(frozen=True)
class Bench:
    """One turn whose sources are random caches, under any method.

    Attributes:
        cached: segments that a prefix cache serves, whatever the method.
    """

    executor: Executor
    turn: Turn
    sources: RandomSources
    clock: Clock
    cached: tuple[Fill, ...] = ()

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        prompt: Prompt,
        node: str,
        draw: Draw,
        *,
        first: bool = False,
        cached: Sequence[int] = (),
    ) -> Bench:
        """``node`` reads ``prompt``, all of whose PH the node ``A1`` left, or nobody (``first``).

        Raises:
            UserError: the context is longer than the model allows.
        """
        executor = Executor(TransformersAdapter(model))
        spec = executor.model.spec
        if len(prompt) > spec.max_positions:
            raise UserError(f"{len(prompt)} tokens are more than the {spec.max_positions} allowed")
        shape, held = KVShape.of(spec), () if first else tuple(prompt.shared())
        return cls(
            executor,
            Turn("request", node, 0 if first else 1, prompt),
            draw.sources(shape, prompt, dict.fromkeys(held, "A1")),
            Clock(spec.device),
            tuple(Fill(i, draw.cache(shape, len(prompt.segments[i]))) for i in cached),
        )

    @property
    def edges(self) -> dict[Edge, int]:
        """Tokens of every transition."""
        prompt = self.turn.prompt
        return {self.turn.edge(i, "A1"): len(prompt.segments[i]) for i in prompt.shared()}

    def kvcmas(self, anchors: int, draw: Draw, rank: int = 32) -> KVCMAS:
        """The method with a full pool; its gate compares, and accepts all."""
        method = KVCMAS(tau=1.0, capacity=anchors, rank_base=rank, rank_delta=rank)
        draw.anchors(method, KVShape.of(self.executor.model.spec), self.edges, anchors)
        return method

    @torch.inference_mode()
    def execute(self, method: Method) -> Buffer:
        """Plan and prefill: what lies before the first token."""
        prompt = self.turn.prompt
        plan = with_fills(prompt, method.plan(self.turn, self.sources), self.cached)
        return self.executor.run(prompt, plan).buffer

    def ttft(self, method: Method) -> float:
        """Seconds of :meth:`execute`."""
        return self.clock.time(lambda: self.execute(method))


def bench_turn(
    model: PreTrainedModel,
    *,
    contexts: Sequence[int],
    anchors: int = 10,
    repeats: int = 3,
    seed: int = 0,
    on_step: Step = lambda step: None,
) -> tuple[BenchRow, ...]:
    """Time the last of three turns of layout T under NonShared, FullShared and KVCMAS, in turn.

    Raises:
        UserError: the context is longer than the model allows.
    """
    rows: list[BenchRow] = []
    for context in contexts:
        draw = Draw(seed)
        vocab = TransformersAdapter(model).spec.vocab
        layout = GeneratorSettings(
            vocab=vocab, shared=context, agents=3, workflows=1, seeds=Seeds.all(seed)
        )
        last = generate(layout)[0].turns[-1]
        on_step(f"{context} tokens: drawing anchors")
        bench = Bench.of(model, last.prompt, last.node.name, draw)
        methods = (NonShared(), FullShared(), bench.kvcmas(anchors, draw))
        parts = {m.name: functools.partial(bench.ttft, m) for m in methods}
        seconds = interleaved(parts, repeats, on_step)
        dense, full, ours = (seconds[m.name] for m in methods)
        label = f"{context} shared tokens"
        goal = TURN_GOALS.get(context)
        rows += [
            BenchRow.paired(f"KVCMAS / NonShared, {label}", ours, dense, goal),
            BenchRow.paired(f"FullShared / NonShared, {label}", full, dense),
            BenchRow.paired(f"KVCMAS / FullShared, {label}", ours, full, FULLSHARED_GOAL),
        ]
    return tuple(rows)


def bench_anchors(
    model: PreTrainedModel,
    *,
    shared: int,
    rank: int = 32,
    repeats: int = 3,
    seed: int = 0,
    on_step: Step = lambda step: None,
) -> tuple[BenchRow, ...]:
    """Time the building of an anchor against the dense prefill that it follows (layout L0).

    Copying the exact cache out of the buffer, differences and all factorisations count.

    Raises:
        UserError: the context is longer than the model allows.
    """
    draw = Draw(seed)
    vocab = TransformersAdapter(model).spec.vocab
    own, query = draw.ids(vocab, BEFORE + AFTER), ph("q", draw.ids(vocab, shared))
    prompt = Prompt((pf(own[:BEFORE]), query, pf(own[BEFORE:])))
    bench = Bench.of(model, prompt, "A2", draw)
    built: list[float] = []

    @torch.inference_mode()
    def dense() -> float:
        method = KVCMAS(rank_base=rank, rank_delta=rank)
        start = bench.clock.now()
        plan = method.plan(bench.turn, bench.sources)
        buffer = bench.executor.run(prompt, plan).buffer
        first = bench.clock.now()
        method.after_first_token(bench.turn, bench.sources, plan, buffer)
        built.append(bench.clock.now() - first)
        return first - start

    seconds = interleaved({"dense prefill and its anchor": dense}, repeats, on_step)
    name = f"anchor building / dense prefill, {shared} tokens"
    return (BenchRow.paired(name, built[1:], seconds["dense prefill and its anchor"], 0.15),)
