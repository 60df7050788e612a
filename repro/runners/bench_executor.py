"""`repro bench executor`: what a turn costs, as ratios within one run on one machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import count

import torch
from transformers import DynamicCache, PreTrainedModel

from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Plan
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import sequential
from kvcmas.method.kvcmas import KVCMAS
from repro.runners.bench_parts import AFTER, BEFORE, Clock, Draw, Step, interleaved
from results.goals import BenchRow

# Tokens that a round decodes.
DECODED = 16


def bench_executor(
    model: PreTrainedModel,
    *,
    shared: int = 2048,
    anchors: int = 10,
    repeats: int = 5,
    seed: int = 0,
    on_step: Step = lambda step: None,
) -> tuple[BenchRow, ...]:
    """Time Transformers, one turn of each kind and decoding, in turn, ``repeats`` times.

    Layout L0 with ``shared`` tokens; token ids are random (the cost does not depend on them).
    KVCMAS runs with ``anchors`` anchors in its pool, all corrections accepted; building one anchor
    is timed apart, because it lies after the first token.

    Raises:
        UserError: the context is longer than the model allows.
    """
    adapter, draw, request = TransformersAdapter(model), Draw(seed), count()
    dense = Engine(adapter, NonShared())
    full = Engine(adapter, FullShared())
    ours = Engine(adapter, KVCMAS(capacity=anchors, tau=1.0))

    def second(engine: Engine, *, force: bool = True) -> TurnResult:
        return _second_turn(engine, draw, shared, f"request-{next(request)}", force=force)

    @torch.inference_mode()
    def forward() -> float:
        ids = torch.tensor([draw.ids(adapter.spec.vocab, BEFORE + shared + AFTER)])
        ids, start = ids.to(model.device), dense.now()
        model(ids, use_cache=True, logits_to_keep=1)
        return dense.now() - start

    builds = []
    for i in range(anchors):
        on_step(f"anchor {i + 1} of {anchors}")
        builds.append(second(ours, force=False).times.build)
    parts = {
        "dense": lambda: second(dense).times.ttft,
        "forward": forward,
        "fullshared": lambda: second(full).times.ttft,
        "kvcmas": lambda: second(ours).times.ttft,
    }
    ids = draw.ids(adapter.spec.vocab, BEFORE + shared + AFTER)
    parts |= _decoding(model, adapter, ids, DECODED * (repeats + 1))
    seconds = interleaved(parts, repeats, on_step)
    base, reused = seconds["dense"], seconds["fullshared"]
    return (
        BenchRow.paired(
            "dense through the executor / Transformers forward", base, seconds["forward"], 1.15
        ),
        BenchRow.paired(
            "decoding through the executor / Transformers",
            seconds["decode"],
            seconds["decode forward"],
            1.0,
        ),
        BenchRow.paired("fully reused turn (FullShared) / dense", reused, base, 0.12),
        BenchRow.paired("accepted KVCMAS turn / dense", seconds["kvcmas"], base, 0.25),
        BenchRow.paired(
            "KVCMAS anchor building / dense", builds, [statistics.median(base)] * anchors, 0.5
        ),
    )


def _decoding(
    model: PreTrainedModel, adapter: TransformersAdapter, ids: tuple[int, ...], room: int
) -> dict[str, Callable[[], float]]:
    """Seconds of ``DECODED`` more tokens after ``ids``, in two ways; ``room`` tokens at most."""
    executor, prompt, clock = Executor(adapter), Prompt((pf(ids),)), Clock(model.device)
    buffer = executor.run(prompt, Plan.make(prompt), new_tokens=room).buffer
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def forward(rows: Sequence[int]) -> None:
        batch = torch.tensor([list(rows)], device=model.device)
        model(batch, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def repeated(step: Callable[[Sequence[int]], object]) -> float:
        return clock.time(lambda: [step(ids[:1]) for _ in range(DECODED)])

    forward(ids)
    return {
        "decode": lambda: repeated(lambda rows: executor.extend(buffer, rows)),
        "decode forward": lambda: repeated(forward),
    }


def _second_turn(
    engine: Engine, draw: Draw, shared: int, request: str, *, force: bool
) -> TurnResult:
    """Two agents that read the same query; returns the second turn, the one that reuses."""
    workflow, vocab = sequential(2), engine.executor.model.spec.vocab
    session = engine.session(workflow, request)
    query = ph("q", draw.ids(vocab, shared))
    results = []
    for node in workflow.nodes:
        prompt = Prompt((pf(draw.ids(vocab, BEFORE)), query, pf(draw.ids(vocab, AFTER))))
        results.append(session.run(node, prompt, max_new_tokens=1, force={1: force}))
    return results[1]
