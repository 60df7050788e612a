"""The open loop: requests are sent when they are due, whatever the engine is doing.

TTFT counts from the *intended* arrival, so a slow engine cannot hide its queue by taking requests
late (coordinated omission). One process drives the engine: requests that fall due during a step
are handed over after it, as in vLLM's own loop.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Outcome, Ready, Request, Served, ServingEngine
from traces.arrival import Arrival
from traces.schema import TurnKey


@dataclass(frozen=True)
class Answered:
    """A served request with when it was meant to arrive and when its sources were there (s)."""

    arrival: float
    released: float
    served: Served


@dataclass(frozen=True)
class Lost:
    """A request without an answer; ``arrival`` is None if it never became due."""

    request: Request
    arrival: float | None
    state: Literal["failed", "unfinished"]
    reason: str


Result = Answered | Lost


def serve(
    engine: ServingEngine,
    requests: Sequence[Request],
    arrivals: Sequence[Arrival],
    clock: Clock,
    *,
    limit: float | None = None,
    on_end: Callable[[int], None] = lambda ended: None,
) -> list[Result]:
    """Serve all requests; one result for each, in the order of ``requests``.

    Args:
        limit: give up after this many seconds of the cell's clock; what is open then is unfinished.
        on_end: told how many requests have ended.
    """
    loop = _Loop(requests, arrivals)
    while limit is None or clock.now() < limit:
        for request, arrival in loop.due(clock.now()):
            engine.submit(request, arrival)
        if engine.busy():
            for event in engine.step():
                if isinstance(event, Ready):
                    loop.ready(event.request.key, event.at)
                else:
                    loop.end(event)
                    on_end(len(loop.results))
        elif (following := loop.next_arrival) is not None:
            clock.idle_until(following)
        else:
            break
    reason = "no event left" if limit is None or clock.now() < limit else f"limit of {limit:g} s"
    loop.give_up(reason)
    return [loop.results[request.key] for request in requests]


class _Loop:
    """Which requests are still to come, wait for a source, are with the engine, or have ended."""

    def __init__(self, requests: Sequence[Request], arrivals: Sequence[Arrival]) -> None:
        self._requests = {request.key: request for request in requests}
        self._ordinal = {request.key: i for i, request in enumerate(requests)}
        self._arrived: dict[TurnKey, float] = {}
        self._ready: dict[TurnKey, float] = {}
        self._ended: dict[TurnKey, float] = {}
        self._coming: list[tuple[float, int, TurnKey]] = []
        self._parked: list[TurnKey] = []
        self._followers: dict[TurnKey, list[Arrival]] = defaultdict(list)
        self.results: dict[TurnKey, Result] = {}
        for arrival in arrivals:
            for before in arrival.after:
                self._followers[before].append(arrival)
            if arrival.time is not None:
                self._expect(arrival.turn, arrival.time)

    @property
    def next_arrival(self) -> float | None:
        """When the next request is due; None if that depends on one that has not ended."""
        return self._coming[0][0] if self._coming else None

    def due(self, now: float) -> list[tuple[Request, float]]:
        """Requests that have arrived and whose sources are there, with their intended arrivals."""
        while self._coming and self._coming[0][0] <= now:
            time, _, key = heapq.heappop(self._coming)
            self._arrived[key] = time
            self._parked.append(key)
        ready = [key for key in self._parked if self._missing(key) == 0]
        self._parked = [key for key in self._parked if self._missing(key)]
        return [(self._requests[key], self._arrived[key]) for key in ready]

    def ready(self, key: TurnKey, at: float) -> None:
        """Whoever waits for the caches of this turn need not wait any longer."""
        self._ready.setdefault(key, at)

    def end(self, outcome: Outcome) -> None:
        """Take note of a request that ended; those that follow it become due."""
        key, when = outcome.request.key, outcome.finished
        self._ended[key] = when
        self.ready(key, when)
        arrival = self._arrived[key]
        if isinstance(outcome, Served):
            sources = [self._ready[need] for need in outcome.request.needs]
            self.results[key] = Answered(arrival, max(arrival, *sources, 0.0), outcome)
        else:
            self.results[key] = Lost(outcome.request, arrival, "failed", outcome.reason)
        for follower in self._followers[key]:
            if all(before in self._ended for before in follower.after):
                self._expect(follower.turn, max(self._ended[before] for before in follower.after))

    def give_up(self, reason: str) -> None:
        """Whatever has not ended is unfinished."""
        open_requests: Mapping[TurnKey, Request] = {
            key: request for key, request in self._requests.items() if key not in self.results
        }
        for key, request in open_requests.items():
            self.results[key] = Lost(request, self._arrived.get(key), "unfinished", reason)

    def _expect(self, key: TurnKey, time: float) -> None:
        heapq.heappush(self._coming, (time, self._ordinal[key], key))

    def _missing(self, key: TurnKey) -> int:
        return sum(need not in self._ready for need in self._requests[key].needs)
