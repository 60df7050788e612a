"""A queue model of serving: the harness's own open loop, with costs in place of an engine.

One server, first come, first served by intended arrival, and turns that wait for their sources, as
in :mod:`repro.runners.serving.loop`, which runs here on a simulated clock. What a request costs
comes from a roofline (:mod:`repro.runners.hop_costs`) or from single-stream records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from repro.runners.serving.budgets import context_free
from repro.runners.serving.cells import Cell
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Event, Ready, Request, Served, Waiting
from repro.runners.serving.loop import Answered, serve
from results.schema import RequestRecord
from results.stats import mean
from traces.arrival import Arrival
from traces.schedule import Reading, readings
from traces.schema import TurnKey

Kind = Literal["first", "corrected", "dense", "reused"]


@dataclass(frozen=True)
class Service:
    """What one request keeps the server busy with.

    Attributes:
        first_token_s: seconds from its start to its first token.
        after_s: seconds after it (anchors, decoding) before the next request can start.
        rows: prompt rows executed, on the mean over layers: its share of a step's budget.
    """

    first_token_s: float
    after_s: float = 0.0
    rows: float = 1.0


@dataclass
class _Running:
    request: Request
    started: float
    left: float


class ModelEngine:
    """A :class:`~repro.runners.serving.engine.ServingEngine` whose time is simulated.

    Args:
        services: cost of every request.
        step_rows: chunked prefill: a step executes this many rows, of as many requests as they
            reach, and first tokens come with its end. A chunk costs its share of the request. None
            serves one whole request after another.

    Attributes:
        clock: the clock to hand to the loop; passes only while a step works.
    """

    def __init__(self, services: Mapping[TurnKey, Service], step_rows: int | None = None) -> None:
        self._services = services
        self._step_rows = step_rows
        self._waiting = Waiting()
        self._running: _Running | None = None
        self._seconds = 0.0
        self.clock = Clock("virtual", source=lambda: self._seconds)

    def submit(self, request: Request, arrival: float) -> None:
        """See the protocol."""
        self._waiting.add(request, arrival)

    def busy(self) -> bool:
        """See the protocol."""
        return self._running is not None or len(self._waiting) > 0

    def step(self) -> Sequence[Event]:
        """Execute one request, or one step's budget of rows."""
        began, budget = self.clock.now(), self._step_rows
        done: list[_Running] = []
        left = float("inf") if budget is None else float(budget)
        while left > 0 and self.busy() and not (budget is None and done):
            if self._running is None:
                request = self._waiting.pop()
                self._running = _Running(request, began, self._services[request.key].rows)
            running, service = self._running, self._services[self._running.request.key]
            taken = min(left, running.left)
            self._seconds += service.first_token_s * taken / service.rows
            left -= taken
            running.left -= taken
            if running.left <= 0:
                done.append(running)
                self._running = None
        token = self.clock.now()
        events: list[Event] = [Ready(one.request, token) for one in done]
        for one in done:
            self._seconds += self._services[one.request.key].after_s
            events.append(Served(one.request, one.started, token, self.clock.now(), (), {}))
        return events

    def close(self) -> None:
        """See the protocol."""
        self._waiting.clear()


def simulate(
    requests: Sequence[Request],
    arrivals: Sequence[Arrival],
    services: Mapping[TurnKey, Service],
    *,
    step_rows: int | None = None,
) -> list[Answered]:
    """Serve all requests in simulated time; results in the order of ``requests``.

    Raises:
        ValueError: a request that never became due.
    """
    engine = ModelEngine(services, step_rows)
    results = serve(engine, requests, arrivals, engine.clock)
    answered = [result for result in results if isinstance(result, Answered)]
    if len(answered) < len(results):
        raise ValueError(f"{len(results) - len(answered)} requests never became due")
    return answered


def ttfts(answered: Iterable[Answered]) -> list[float]:
    """Intended arrival to first token, in seconds."""
    return [one.served.first_token - one.arrival for one in answered]


def reused_segments(
    cell: Cell, method: Method, requests: Iterable[Request]
) -> dict[TurnKey, tuple[int, ...]]:
    """Prompt segments that each request of ``cell``, served by ``method``, fills from a cache.

    Raises:
        UserError: gates decide it.
    """
    if cell.budget.kind == "none":
        return {request.key: () for request in requests}
    if cell.schedule is None:
        raise UserError(f"{cell.name} leaves its reuse to a gate; the model needs a schedule")
    correct_first = context_free(method) and method.settings()["first_turn"] == "corrected"
    found = {}
    for request in requests:
        first = {reading.transition.slot: reading.first for reading in _read(request)}
        found[request.key] = tuple(
            i
            for i, accepted in request.force.items()
            if accepted and (correct_first or not first[request.prompt.slot(i)])
        )
    return found


def kinds(cell: Cell, method: Method, requests: Sequence[Request]) -> dict[TurnKey, Kind]:
    """Which mean of the single-stream records each request of ``cell`` takes."""
    reused = reused_segments(cell, method, requests)
    return {request.key: _kind_of(request, reused[request.key]) for request in requests}


def kind_of_record(row: RequestRecord) -> Kind:
    """The same of a request that was served."""
    return _kind((edge.first, edge.tokens, edge.action != "dense") for edge in row.edges)


def measured_services(rows: Iterable[RequestRecord]) -> dict[Kind, Service]:
    """Mean cost of each kind of hop, from requests that were served as a single stream.

    Without a queue TTFT is service alone, whatever an engine calls the start of a request.
    """
    grouped: dict[Kind, list[RequestRecord]] = defaultdict(list)
    for row in rows:
        grouped[kind_of_record(row)].append(row)
    return {
        kind: Service(
            first_token_s=mean([row.ttft_s for row in found]),
            after_s=mean([max(0.0, row.e2e_s - row.ttft_s) for row in found]),
            rows=mean([row.entries.executed / row.layers for row in found]),
        )
        for kind, found in grouped.items()
    }


def _read(request: Request) -> tuple[Reading, ...]:
    return tuple(readings(request.workflow))[request.position]


def _kind_of(request: Request, reused: tuple[int, ...]) -> Kind:
    slots = {request.prompt.slot(i) for i in reused}
    return _kind((r.first, r.tokens, r.transition.slot in slots) for r in _read(request))


def _kind(read: Iterable[tuple[bool, int, bool]]) -> Kind:
    """From (first reading, tokens, reused) of what a turn reads; the longer part decides."""
    shared = [(first, tokens, reused) for first, tokens, reused in read if tokens]
    held = [one for one in shared if not one[0]]
    counted = held or shared
    reused = sum(tokens for _, tokens, is_reused in counted if is_reused)
    mostly = 2 * reused > sum(tokens for _, tokens, _ in counted)
    if held:
        return "reused" if mostly else "dense"
    return "corrected" if mostly else "first"
