"""What the open loop asks of an engine, and what it gets back."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvcmas.engine.segments import Prompt
from traces.schema import TraceTurn, TraceWorkflow, TurnKey


@dataclass(frozen=True)
class Request:
    """One agent request of a trace, ready to be served.

    Attributes:
        position: of the turn in its workflow, from 0.
        force: decisions taken beforehand, by segment index; empty leaves them to the method.
        needs: turns whose caches this request reads; it is held back until they have ended.
    """

    workflow: TraceWorkflow
    turn: TraceTurn
    position: int
    prompt: Prompt
    force: Mapping[int, bool]
    needs: tuple[TurnKey, ...]

    @property
    def key(self) -> TurnKey:
        """Which turn of which user request."""
        return TurnKey(self.workflow.request, self.turn.node.name)

    @property
    def last(self) -> bool:
        """Whether the workflow ends with it."""
        return self.position == len(self.workflow.turns) - 1


@dataclass(frozen=True)
class Served:
    """A request that got its tokens; times are seconds on the cell's clock.

    Attributes:
        token_times: when each token of the output came, where outputs were decoded.
        measured: fields of the record that tell what was executed and held.
        fallback: why the engine served it densely against the method's plan.
    """

    request: Request
    started: float
    first_token: float
    finished: float
    token_times: tuple[float, ...]
    measured: Mapping[str, Any]
    fallback: str | None = None


@dataclass(frozen=True)
class Failed:
    """A request that ended in an error at ``finished``."""

    request: Request
    finished: float
    reason: str


@dataclass(frozen=True)
class Ready:
    """The tokens of a request are out: turns that read its caches may be handed over."""

    request: Request
    at: float


Outcome = Served | Failed
Event = Ready | Outcome


class Waiting:
    """Requests that nobody has begun, in the order of their intended arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, arrival: float) -> None:
        """Add one; of two that arrive together the one added first goes first."""
        heapq.heappush(self._heap, (arrival, self._count, request))
        self._count += 1

    def pop(self) -> Request:
        """Take the first one."""
        return heapq.heappop(self._heap)[2]

    def clear(self) -> None:
        """Forget all of them."""
        self._heap.clear()


class ServingEngine(Protocol):
    """One method on one model.

    Of the requests that it holds an engine begins the one that was to arrive first. A request that
    waits for its sources comes late, but goes ahead of those that arrived after it: else the first
    turns of later workflows would overtake it, and only in methods that have sources.
    """

    def submit(self, request: Request, arrival: float) -> None:
        """Take a request whose sources are there; ``arrival`` is the intended one, in seconds."""
        ...

    def busy(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def step(self) -> Sequence[Event]:
        """Work for a while; returns what happened, in order.

        A request ends once; an engine that finishes with it later says before that it is ready.
        """
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...
