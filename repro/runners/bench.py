"""`repro bench executor`: what a turn costs, as ratios within one run on one machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import sequential
from kvcmas.method.kvcmas import KVCMAS

# Layout L0 (DESIGN section 7): agent-specific tokens before and after the shared span.
BEFORE, AFTER = 64, 16


@dataclass(frozen=True)
class Cost:
    """One row: seconds per repeat, and the paired ratio to dense prefill through the executor.

    ``limit`` is the goal this suite set itself for the ratio's median, where there is one.
    """

    name: str
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]
    limit: float | None = None

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median of the paired ratios."""
        return statistics.median(self.ratios)


def bench_executor(
    model: PreTrainedModel,
    *,
    shared: int = 2048,
    anchors: int = 10,
    repeats: int = 5,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda step: None,
) -> list[Cost]:
    """Time Transformers' forward and one turn of each kind, in turn, ``repeats`` times.

    Layout L0 with ``shared`` tokens; token ids are random (the cost does not depend on them). One
    round is a warm-up and discarded. KVCMAS runs with ``anchors`` anchors in its pool, all
    corrections accepted; building one anchor is timed apart, because it lies after the first token.

    Raises:
        UserError: the context is longer than the model allows.
    """
    adapter = TransformersAdapter(model)
    tokens = _Tokens(adapter.spec.vocab, seed)
    engines = {
        method.name: Engine(adapter, method)
        for method in (NonShared(), FullShared(), KVCMAS(capacity=anchors, tau=1.0))
    }
    builds = []
    for i in range(anchors):
        on_step(f"anchor {i + 1} of {anchors}")
        second = _workflow(engines["kvcmas"], tokens, shared, f"anchor-{i}", force=False)
        builds.append(second.times.build)
    rounds: dict[str, list[float]] = {}
    for i in range(repeats + 1):
        on_step(f"round {i} of {repeats}" if i else "warm-up round")
        for name, seconds in _round(model, engines, tokens, shared, i):
            if i:
                rounds.setdefault(name, []).append(seconds)
    dense = rounds["dense"]
    rows = [
        _cost("Transformers forward", rounds["forward"], dense),
        _cost("dense through the executor", dense, dense),
        _cost("fully reused turn (FullShared)", rounds["fullshared"], dense, 0.12),
        _cost("accepted KVCMAS turn", rounds["kvcmas"], dense, 0.25),
        Cost(
            "KVCMAS anchor building (after the first token)",
            tuple(builds),
            tuple(b / statistics.median(dense) for b in builds),
            0.5,
        ),
    ]
    executor = _cost("dense / Transformers", dense, rounds["forward"], 1.15)
    return [*rows, executor]


def _cost(
    name: str, seconds: Sequence[float], base: Sequence[float], limit: float | None = None
) -> Cost:
    ratios = tuple(s / b for s, b in zip(seconds, base, strict=True))
    return Cost(name, tuple(seconds), ratios, limit)


class _Tokens:
    """Seeded random token ids."""

    def __init__(self, vocab: int, seed: int) -> None:
        self._vocab = vocab
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, n: int) -> tuple[int, ...]:
        return tuple(torch.randint(self._vocab, (n,), generator=self._generator).tolist())


def _round(
    model: PreTrainedModel, engines: dict[str, Engine], tokens: _Tokens, shared: int, index: int
) -> Iterator[tuple[str, float]]:
    """One pass over everything that is timed; the order alternates so that drift cancels."""
    names = list(engines) if index % 2 else list(engines)[::-1]
    for name in names:
        second = _workflow(engines[name], tokens, shared, f"round-{index}", force=True)
        yield ("dense" if name == "nonshared" else name), second.times.ttft
        if name == "nonshared":
            ids = torch.tensor([second.prompt.ids], device=model.device)
            start = engines[name].now()
            with torch.inference_mode():
                model(ids, use_cache=True, logits_to_keep=1)
            yield "forward", engines[name].now() - start


def _workflow(
    engine: Engine, tokens: _Tokens, shared: int, request: str, *, force: bool
) -> TurnResult:
    """Two agents that read the same query; returns the second turn, the one that reuses."""
    workflow = sequential(2)
    session = engine.session(workflow, request)
    query = tokens.draw(shared)
    results = []
    for node in workflow.nodes:
        prompt = Prompt((pf(tokens.draw(BEFORE)), ph("q", query), pf(tokens.draw(AFTER))))
        results.append(session.run(node, prompt, max_new_tokens=1, force={1: force}))
    return results[1]
