"""Which transitions are dense: schedules that hold a reuse ratio, whatever a gate would say.

A transition is one turn's reading of one shared slot that somebody holds already. A turn that reads
a slot first has nothing to reuse; methods with a context-free reference may correct such a *first
reading* too, so schedules decide it as well, in a series of its own: rho counts transitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from kvcmas.engine.segments import Prompt
from kvcmas.errors import UserError
from traces.schema import TraceWorkflow, turn_keys

Unit = Literal["transition", "hop"]
HopKind = Literal["first", "dense", "refill", "reused"]


class Transition(NamedTuple):
    """Turn ``node`` of workflow ``request`` reads ``slot``."""

    request: str
    node: str
    slot: str


class Reading(NamedTuple):
    """A transition with its length; ``first`` if nobody held the slot before."""

    transition: Transition
    tokens: int
    first: bool


def readings(workflow: TraceWorkflow) -> Iterator[tuple[Reading, ...]]:
    """What each turn reads, turn by turn; empty segments are left out."""
    held: set[str] = set()
    for turn in workflow.turns:
        node = turn.node
        slots = [(s.slot, len(s.ids)) for s in turn.segments if s.slot is not None and s.ids]
        yield tuple(
            Reading(Transition(workflow.request, node.name, slot), tokens, slot not in held)
            for slot, tokens in slots
        )
        held |= {slot for slot, _ in slots} | {node.out_slot}


@dataclass(frozen=True)
class Schedule:
    """Accept (True) or dense (False) for every reading of a trace.

    Attributes:
        settings: what made it, JSON-able, for run records.
    """

    accept: Mapping[Transition, bool]
    settings: Mapping[str, Any]

    def force(self, request: str, node: str, prompt: Prompt) -> dict[int, bool]:
        """The decisions of one turn by segment index, as the engine takes them.

        Raises:
            ValueError: the schedule was made for another trace.
        """
        try:
            return {
                i: self.accept[Transition(request, node, prompt.slot(i))] for i in prompt.shared()
            }
        except KeyError as error:
            raise ValueError(f"the schedule does not know {error.args[0]}") from None


@dataclass(frozen=True)
class Rho:
    """Realised reuse ratio: of shared tokens, of transitions, and of turns that reused it all."""

    tokens: float
    transitions: float
    calls: float


def realised_rho(
    schedule: Schedule, workflows: Iterable[TraceWorkflow], *, include_first: bool = False
) -> Rho:
    """What the schedule comes to on these workflows; NaN where there is no transition.

    ``include_first`` counts first readings as well (methods that correct them).
    """
    calls = [
        [reading for reading in turn if include_first or not reading.first]
        for workflow in workflows
        for turn in readings(workflow)
    ]
    flat = [(schedule.accept[r.transition], r.tokens) for call in calls for r in call]
    whole = [all(schedule.accept[r.transition] for r in call) for call in calls if call]
    if not flat:
        return Rho(math.nan, math.nan, math.nan)
    return Rho(
        tokens=sum(tokens for accepted, tokens in flat if accepted) / sum(n for _, n in flat),
        transitions=sum(accepted for accepted, _ in flat) / len(flat),
        calls=sum(whole) / len(whole),
    )


def controlled_schedule(
    workflows: Sequence[TraceWorkflow], rho: float, *, unit: Unit = "transition", seed: int = 0
) -> Schedule:
    """A schedule whose number of dense transitions is ``1 - rho`` of them, rounded once.

    Every ``1/(1 - rho)``-th one is dense, slot by slot and workflow by workflow, so that each slot
    and each workflow of a slot gets its share to within one. The seed shuffles the turns within a
    workflow (else a period that divides their number would always hit the same agent) and chooses
    where to begin.

    Args:
        unit: ``hop`` makes whole turns dense, with all transitions of the turn.

    Raises:
        UserError: rho not in [0, 1], an unknown unit, or two workflows of one name.
    """
    share = _ratio(rho)
    if unit not in get_args(Unit):
        raise UserError(f"unknown unit {unit!r}; known: {', '.join(get_args(Unit))}")
    turn_keys(workflows)
    rng = np.random.default_rng(seed)
    calls = [turn for workflow in workflows for turn in readings(workflow)]
    later = [[r.transition for r in turn if not r.first] for turn in calls]
    runs = [_by_slot(later), _by_slot([r.transition for r in turn if r.first] for turn in calls)]
    if unit == "hop":
        runs[0] = _by_workflow(later)
    accept: dict[Transition, bool] = {}
    for series in runs:
        order = [run[i] for run in series for i in rng.permutation(len(run))]
        for group, dense in zip(order, _every(len(order), share, rng), strict=True):
            accept |= dict.fromkeys(group, not dense)
    settings = {"schedule": "controlled", "rho": rho, "unit": unit, "seed": seed}
    return Schedule(accept, settings)


def even_hops(hops: Sequence[int], rho: float) -> tuple[HopKind, ...]:
    """The public serving harness's schedule; ``hops`` are the turns of each workflow.

    Every ``1/(1 - rho)``-th request of the whole sequence, the first one included, brings shared
    tokens of its own, and so prefills everything (``dense``). Where that is the first hop of a
    workflow, the workflow's own tokens come with the next hop, which prefills everything in turn
    (``refill``). All kinds but ``reused`` are full prefills.

    Raises:
        UserError: rho not in [0, 1].
    """
    dense_share = 1 - _ratio(rho)
    kinds: list[HopKind] = []
    for count in hops:
        held = False
        for hop in range(count):
            index = len(kinds)
            if math.floor(index * dense_share) > math.floor((index - 1) * dense_share):
                kinds.append("dense")
            elif held:
                kinds.append("reused")
            else:
                kinds.append("refill" if hop else "first")
                held = True
    return tuple(kinds)


def even_schedule(workflows: Sequence[TraceWorkflow], rho: float) -> Schedule:
    """:func:`even_hops` as a schedule: ``dense`` and ``refill`` hops refuse all they read.

    Refills make the realised rho lower than ``rho``; that is how the public harness counts.

    Raises:
        UserError: rho not in [0, 1], or two workflows of one name.
    """
    turn_keys(workflows)
    calls = [turn for workflow in workflows for turn in readings(workflow)]
    kinds = even_hops([len(workflow.turns) for workflow in workflows], rho)
    accept = {
        reading.transition: kind in ("first", "reused")
        for turn, kind in zip(calls, kinds, strict=True)
        for reading in turn
    }
    return Schedule(accept, {"schedule": "even", "rho": rho})


def _ratio(rho: float) -> Fraction:
    if not 0 <= rho <= 1:
        raise UserError(f"rho={rho} must be between 0 and 1")
    # Through the decimal text: 0.8 is meant, not the nearest binary number.
    return Fraction(str(rho))


def _every(n: int, rho: Fraction, rng: np.random.Generator) -> list[bool]:
    """``n`` flags of which ``(1 - rho) n``, rounded, are set at even distances."""
    chosen = round((1 - rho) * n)
    begin = int(rng.integers(n)) if n else 0
    return [(i * chosen + begin) // n < ((i + 1) * chosen + begin) // n for i in range(n)]


def _by_slot(calls: Iterable[list[Transition]]) -> list[list[list[Transition]]]:
    """Single transitions, those of one slot and workflow side by side."""
    flat = sorted((t for call in calls for t in call), key=lambda t: t.slot)
    runs = groupby(flat, key=lambda t: (t.slot, t.request))
    return [[[transition] for transition in run] for _, run in runs]


def _by_workflow(calls: Iterable[list[Transition]]) -> list[list[list[Transition]]]:
    """Whole turns, those of one workflow side by side."""
    runs = groupby((call for call in calls if call), key=lambda call: call[0].request)
    return [list(run) for _, run in runs]
