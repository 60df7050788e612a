"""What the open loop asks of an engine, and what it gets back."""

from __future__ import annotations

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


Outcome = Served | Failed


class ServingEngine(Protocol):
    """One method on one model, serving requests in the order it sees fit."""

    def submit(self, request: Request) -> None:
        """Take a request; its sources are there."""
        ...

    def busy(self) -> bool:
        """Whether a step has anything to do."""
        ...

    def step(self) -> Sequence[Outcome]:
        """Work for a while; returns the requests that ended, in order."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...
