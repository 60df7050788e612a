"""The contract between methods and the engine: a method is a row schedule (DESIGN section 4).

A method answers, for each layer, which prompt rows the model executes and what the other rows of
the buffer hold. It never runs the model itself, never times and never counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor

from kvcmas.engine.cache import Buffer, SegmentCache
from kvcmas.engine.segments import Prompt
from kvcmas.errors import UserError

Action = Literal["dense", "reuse", "correct", "recompute"]
PFPolicy = Literal["dense", "rotate", "delta"]


@dataclass(frozen=True)
class Edge:
    """A transition of one PH: who held it, who reads it. Node names recur across requests."""

    slot: str
    source: str
    target: str


@dataclass(frozen=True)
class Held:
    """A source cache with its last user; ``exact`` if no approximate entry went into it."""

    cache: SegmentCache
    node: str
    exact: bool


class Sources(Protocol):
    """What a method may ask of the workflow's shared memory, by segment index of the prompt."""

    def held(self, segment: int) -> Held | None:
        """Cache that the PH's last user left, or None if nobody holds it yet."""
        ...

    def reference(self, segment: int) -> SegmentCache:
        """Context-free reference, prefilled now (and charged to this turn) if there is none."""
        ...


@dataclass(frozen=True)
class Turn:
    """One agent request as methods see it.

    Attributes:
        request: id of the user request (an anchor is keyed by slot and request).
        node: this turn's node name in the static workflow graph.
        index: position of the turn in the workflow's static order, 0 for the first.
        force: per segment index, a decision taken beforehand (replay at a set reuse ratio, pool
            warm-up): True accepts, False refuses. Gates are skipped for these segments.
    """

    request: str
    node: str
    index: int
    prompt: Prompt
    force: Mapping[int, bool] = field(default_factory=dict)

    def edge(self, segment: int, source: str) -> Edge:
        """The transition of PH ``segment`` from ``source`` to this turn."""
        return Edge(self.prompt.slot(segment), source, self.node)


class Correction(Protocol):
    """A delta that the executor adds while it fills a layer."""

    @property
    def rows(self) -> int:
        """Covered prefix; the rows after it keep the aligned source."""
        ...

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add the delta of ``layer`` in place to canonical ``k, v [kv_heads, rows, head_dim]``."""
        ...


@dataclass(frozen=True)
class Fill:
    """Rows of a segment that hold a cached state instead of being executed from layer 0."""

    segment: int
    cache: SegmentCache
    correction: Correction | None = None


@dataclass(frozen=True)
class Enter:
    """Rows become active at ``layer``, with ``hidden [rows, hidden]`` or, at layer 0, embeddings.

    ``write=False`` executes them without scattering their K and V.
    """

    layer: int
    rows: Tensor
    hidden: Tensor | None = None
    write: bool = True


@dataclass(frozen=True)
class Leave:
    """Rows are no longer active from ``layer`` on."""

    layer: int
    rows: Tensor


@dataclass(frozen=True)
class Candidates:
    """What a selection sees: fresh and buffered K and V, ``[kv_heads, rows, head_dim]``.

    Keys are rotated to their target positions.
    """

    layer: int
    rows: Tensor
    k_new: Tensor
    v_new: Tensor
    k_old: Tensor
    v_old: Tensor


@dataclass(frozen=True)
class Select:
    """At ``layer`` keep the rows of ``rows`` that ``choose`` returns; the others become inactive.

    Kept rows are scattered from this layer on. ``write_all`` scatters every candidate at this
    layer. Rows that an earlier selection dropped are no candidates any more.
    """

    layer: int
    rows: Tensor
    choose: Callable[[Candidates], Tensor]
    write_all: bool = False


Event = Enter | Leave | Select


@dataclass(frozen=True)
class Decision:
    """What happened to one PH and why; ``entropy`` is the gate's, where one was taken."""

    segment: int
    edge: Edge | None
    action: Action
    reason: str
    entropy: float | None = None


@dataclass(frozen=True)
class Plan:
    """Fills, schedule and the decision for every PH of the prompt."""

    fills: tuple[Fill, ...]
    events: tuple[Event, ...]
    decisions: tuple[Decision, ...]

    @classmethod
    def make(
        cls,
        prompt: Prompt,
        fills: tuple[Fill, ...] = (),
        decisions: tuple[Decision, ...] = (),
        extra: tuple[Event, ...] = (),
    ) -> Plan:
        """Rows without a fill, and the last row, enter at layer 0; then ``extra`` events."""
        return cls(fills, (Enter(0, unfilled_rows(prompt, fills)), *extra), decisions)


def unfilled_rows(prompt: Prompt, fills: tuple[Fill, ...]) -> Tensor:
    """Sorted rows that no fill covers, and the prompt's last row."""
    return (~_covered(prompt, fills)).nonzero().squeeze(1)


def filled_rows(prompt: Prompt, fills: tuple[Fill, ...]) -> Tensor:
    """Sorted rows that a fill covers, without the last row: those a schedule may still enter."""
    return _covered(prompt, fills).nonzero().squeeze(1)


def _covered(prompt: Prompt, fills: tuple[Fill, ...]) -> Tensor:
    covered = torch.zeros(len(prompt), dtype=torch.bool)
    for fill in fills:
        rows = prompt.rows(fill.segment)
        covered[rows.start : rows.stop] = True
    covered[-1] = False
    return covered


@dataclass
class State:
    """Learned state: ``meta`` is JSON-able; ``entries`` are named groups of tensors.

    An entry never changes once made, so a checkpoint writes each name once.
    """

    meta: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(t.nbytes for entry in self.entries.values() for t in entry.values())


@dataclass(frozen=True)
class Wants:
    """What the engine keeps or prepares for a method.

    Attributes:
        sources: keep source caches between turns.
        references: context-free references may be filled, so that a first reading may reuse too.
        hidden_layers: keep residual rows before these layers with each source cache.
        received: keep with each source cache the attention that its tokens received from ``decode``
            steps, or from ``all`` later rows, which costs the first turn time to its first token.
        background_reference: prepare context-free references before the turn's clock starts.
    """

    sources: bool = True
    references: bool = False
    hidden_layers: tuple[int, ...] = ()
    received: Literal["decode", "all"] | None = None
    background_reference: bool = False


@dataclass(frozen=True)
class Method(ABC):
    """A KV cache sharing method: frozen settings plus the functions below.

    Illegal settings, alone or together, raise :class:`~kvcmas.errors.UserError` at construction.

    Attributes:
        pf_policy: how agent-specific segments are served; the engine carries it out for every
            method.
            ``dense`` executes them, ``rotate`` re-aligns those of a template prefill, ``delta``
            adds a preconstructed low-rank delta to that (paper A.2).
        pf_rank: rank of the ``delta`` policy.
    """

    name: ClassVar[str]

    pf_policy: PFPolicy = "dense"
    pf_rank: int = 8

    def __post_init__(self) -> None:
        require_choice("pf_policy", self.pf_policy, get_args(PFPolicy))
        require_count("pf_rank", self.pf_rank, 1)

    @property
    def wants(self) -> Wants:
        """What to keep between turns."""
        return Wants()

    @property
    def learns(self) -> bool:
        """Whether a turn teaches anything to later requests; else there is nothing to warm up."""
        overridden = type(self).after_first_token is not Method.after_first_token
        return overridden or self.pf_policy != "dense"

    @abstractmethod
    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Decide every row of ``turn.prompt``; one decision per non-empty PH."""

    def after_first_token(self, turn: Turn, sources: Sources, plan: Plan, buffer: Buffer) -> None:  # noqa: B027
        """Learn from the turn (anchor building): outside TTFT, inside E2E. Most methods do not."""

    def state(self) -> State:
        """Everything learned so far."""
        return State()

    def load_state(self, state: State) -> None:
        """Restore :meth:`state`.

        Raises:
            ValueError: a state of another method.
        """
        if state.entries:
            raise ValueError(f"{self.name} keeps no state, but one was given")

    def settings(self) -> dict[str, Any]:
        """Settings as JSON-able values, for records and run keys."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise UserError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise UserError(f"{name}={value!r} is not one of {', '.join(map(str, choices))}")


def require_at_least(name: str, value: float, least: float) -> None:
    """Raise UserError unless ``value`` is a number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise UserError(f"{name}={value!r} must be at least {least}")


def require_count(name: str, value: int, least: int) -> None:
    """Raise UserError unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}={value!r} must be a whole number of at least {least}")
