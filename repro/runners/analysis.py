"""What the analyses of `repro analyze` share: exact caches along recorded workflows.

Every turn is dense, so each segment's cache is exact, and the cache its last user left is the exact
source (chained everywhere, paper 3.2). The analyses themselves are in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcmas.engine.cache import ContiguousBuffer, SegmentCache
from kvcmas.engine.contract import Plan
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, Segment
from traces.schema import TraceWorkflow


@dataclass(frozen=True)
class ExactSegment:
    """A non-empty PH under dense prefill, keys canonical.

    Attributes:
        index: of the segment in the prompt.
        source: what its last user left; None where nobody held it.
        holder: that user's node.
    """

    index: int
    slot: str
    cache: SegmentCache
    source: SegmentCache | None
    holder: str | None


@dataclass(frozen=True)
class ExactTurn:
    """One dense turn."""

    request: str
    node: str
    prompt: Prompt
    segments: tuple[ExactSegment, ...]


def exact_turns(
    executor: Executor, workflow: TraceWorkflow, *, received: bool = False
) -> Iterator[ExactTurn]:
    """All turns of a recorded workflow under dense prefill, outputs teacher-forced.

    ``received`` keeps with each cache the attention its tokens received in the turn that made it.
    """
    held: dict[str, tuple[str, SegmentCache]] = {}
    for turn in workflow.turns:
        prompt, node = turn.prompt, turn.node
        buffer = dense(executor, prompt, turn.output, received=received)
        segments = []
        for index in prompt.shared():
            slot, cache = prompt.slot(index), buffer.extract(prompt.rows(index))
            holder, source = held.get(slot, (None, None))
            segments.append(ExactSegment(index, slot, cache, source, holder))
        yield ExactTurn(workflow.request, node.name, prompt, tuple(segments))
        held |= {segment.slot: (node.name, segment.cache) for segment in segments}
        if turn.output:
            rows = range(len(prompt), len(prompt) + len(turn.output))
            held[node.out_slot] = (node.name, buffer.extract(rows))


def dense(
    executor: Executor, prompt: Prompt, output: Sequence[int] = (), *, received: bool = False
) -> ContiguousBuffer:
    """The buffer of a dense prefill and a forced output."""
    run = executor.run(prompt, Plan.make(prompt), new_tokens=len(output), received=received)
    if output:
        executor.extend(run.buffer, output)
    return run.buffer


def context_free(executor: Executor, prefix: Sequence[int], shared: Segment) -> SegmentCache:
    """The context-free reference of ``shared``: after ``prefix`` alone, which is dropped."""
    prompt = Prompt((Segment("PF", tuple(prefix)), shared))
    return dense(executor, prompt).extract(prompt.rows(1))
