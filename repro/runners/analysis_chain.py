"""`repro analyze chain`: errors of chained and of non-chained correction (Figure 3).

KVCMAS with a warm pool and every correction accepted, against the exact cache of the same turn.
Errors of one turn live on in the caches that later turns start from, as they do in serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from baselines.fullshared import FullShared
from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.executor import Executor
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.errors import UserError
from kvcmas.method.kvcmas import KVCMAS
from kvcmas.registry import make_method
from repro.runners.analysis import ExactSegment, ExactTurn, context_free, exact_turns
from repro.runners.fidelity import relative_errors
from repro.runners.replay import replay, warm_up
from results.analysis import ChainRow, Part
from traces.schema import TraceWorkflow

Reference = Literal["source", "context-free"]
Correction = Literal["kvcmas", "none"]


class Chain:
    """Both references, corrected and plain, on one model.

    Args:
        warm: workflows that fill both pools, with every correction refused.
        settings: of KVCMAS, ``chained`` excepted.

    Raises:
        UserError: no warm-up workflow, or an illegal setting.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        topology: str,
        warm: tuple[TraceWorkflow, ...],
        *,
        reference_prefix: Sequence[int],
        settings: Mapping[str, Any],
    ) -> None:
        if not warm:
            raise UserError("a warm pool needs workflows to fill it; give --warm")
        if "chained" in settings:
            raise UserError("chained is what this analysis compares; it cannot be set")
        self._executor = Executor(adapter)
        self._topology = topology
        self._prefix = tuple(reference_prefix)
        self._engines: dict[tuple[Reference, Correction], Engine] = {
            ("source", "none"): Engine(adapter, FullShared()),
            ("source", "kvcmas"): Engine(
                adapter, make_method(KVCMAS.name, {**settings, "chained": True})
            ),
            ("context-free", "kvcmas"): Engine(
                adapter,
                make_method(KVCMAS.name, {**settings, "chained": False}),
                reference_prefix=self._prefix,
            ),
        }
        for (_, correction), engine in self._engines.items():
            if correction == "kvcmas":
                warm_up(engine, warm, topology)

    def rows(self, workflow: TraceWorkflow) -> Iterator[ChainRow]:
        """Rows of every segment of one workflow, per reference, correction, layer, K and V."""
        runs = [
            replay(engine, workflow, self._topology, accept=True, keep_buffers=True)
            for engine in self._engines.values()
        ]
        references: dict[str, SegmentCache] = {}
        exact = exact_turns(self._executor, workflow)
        for turn, (truth, *results) in enumerate(zip(exact, *runs, strict=True)):
            for segment in truth.segments:
                for (reference, correction), result in zip(self._engines, results, strict=True):
                    yield from _served(truth, turn, segment, reference, correction, result)
                if segment.slot not in references:
                    shared = truth.prompt.segments[segment.index]
                    references[segment.slot] = context_free(self._executor, self._prefix, shared)
                yield from _rows(
                    truth,
                    turn,
                    segment,
                    references[segment.slot],
                    reference="context-free",
                    correction="none",
                    action="reuse",
                )


def _served(
    truth: ExactTurn,
    turn: int,
    segment: ExactSegment,
    reference: Reference,
    correction: Correction,
    result: TurnResult,
) -> Iterator[ChainRow]:
    """Rows of a segment as a method left it in its buffer."""
    if result.buffer is None or result.prompt.sha256 != truth.prompt.sha256:
        raise ValueError("a replay must keep its buffers and see identical token ids")
    cache = result.buffer.extract(result.prompt.rows(segment.index))
    decision = next(d for d in result.decisions if d.segment == segment.index)
    entries = result.accounting.shared[segment.index]
    yield from _rows(
        truth,
        turn,
        segment,
        cache,
        reference=reference,
        correction=correction,
        action=decision.action,
        # Layer 0 is never corrected.
        covered=entries.corrected // max(1, cache.k.shape[0] - 1),
    )


def _rows(
    truth: ExactTurn,
    turn: int,
    segment: ExactSegment,
    cache: SegmentCache,
    *,
    reference: Reference,
    correction: Correction,
    action: str,
    covered: int = 0,
) -> Iterator[ChainRow]:
    errors: tuple[tuple[Part, tuple[float, ...]], ...] = (
        ("k", relative_errors(cache.k, segment.cache.k)),
        ("v", relative_errors(cache.v, segment.cache.v)),
    )
    for part, by_layer in errors:
        for layer, error in enumerate(by_layer):
            yield ChainRow(
                truth.request,
                reference,
                correction,
                truth.node,
                turn,
                segment.slot,
                segment.holder,
                action,
                len(cache),
                covered,
                part,
                layer,
                error,
            )
