"""Work bounds: how much faster a method can be at best when prefill is all that costs.

Every method executes agent-specific (PF) tokens, the first reading of a slot and what a schedule
makes dense. Work is counted in prompt tokens, so attention's quadratic part and a method's own cost
are left out. A bound holds for throughput, and for latency without queueing or deep in overload;
between two methods' capacities only the slower one has a queue, and latencies are further apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from traces.schedule import Schedule, readings
from traces.schema import TraceTurn, TraceWorkflow


def work_bound(hops: int, rho: float, f: float) -> float:
    """Dense work over executed work of ``hops`` hops of equal length, the first one dense.

    ``f`` is the PF share of a hop; a share ``rho`` of the later hops reuses all it reads.

    Raises:
        ValueError: no hop, or a share outside [0, 1].
    """
    if hops < 1 or not 0 <= rho <= 1 or not 0 <= f <= 1:
        raise ValueError(f"no work bound for hops={hops}, rho={rho}, f={f}")
    later = hops - 1
    return hops / (1 + later * (1 - rho) + later * rho * f)


def pf_share(turn: TraceTurn) -> float:
    """``f``: share of a prompt's tokens that are agent-specific."""
    tokens = [len(segment.ids) for segment in turn.segments]
    own = sum(n for n, segment in zip(tokens, turn.segments, strict=True) if segment.slot is None)
    return own / sum(tokens)


def later_pf_share(workflows: Iterable[TraceWorkflow]) -> float:
    """``f`` of the hops that have something to reuse, by tokens; NaN if there are none."""
    own = total = 0.0
    for workflow in workflows:
        for turn, read in zip(workflow.turns, readings(workflow), strict=True):
            if any(not reading.first for reading in read):
                total += len(turn.prompt)
                own += pf_share(turn) * len(turn.prompt)
    return own / total if total else math.nan


@dataclass(frozen=True)
class Work:
    """Prompt tokens: all of them, and those that have to be executed."""

    tokens: int
    executed: int

    @property
    def bound(self) -> float:
        """Upper bound of the speed-up over dense prefill."""
        return self.tokens / self.executed


def scheduled_work(
    workflows: Iterable[TraceWorkflow],
    schedule: Schedule,
    *,
    correct_first: bool = False,
    references: bool = False,
) -> Work:
    """Count a schedule's work on the trace itself.

    Args:
        correct_first: first readings that the schedule accepts are corrected (non-chained methods
            with ``first_turn=corrected``), else dense.
        references: every shared slot is prefilled once more without context (non-chained methods
            with ``reference=on_path``).
    """
    tokens = executed = 0
    for workflow in workflows:
        slots: dict[str, int] = {}
        for turn, read in zip(workflow.turns, readings(workflow), strict=True):
            slots |= {reading.transition.slot: reading.tokens for reading in read}
            saved = sum(
                reading.tokens
                for reading in read
                if schedule.accept[reading.transition] and (correct_first or not reading.first)
            )
            tokens += len(turn.prompt)
            # At least the last row runs, or there would be no first token.
            executed += max(1, len(turn.prompt) - saved)
        executed += sum(slots.values()) if references else 0
    return Work(tokens, executed)
