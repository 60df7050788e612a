"""The open loop and its clock, on an engine whose steps take as long as they are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from kvcmas.errors import UserError
from repro.runners.serving.clock import Clock, ClockKind
from repro.runners.serving.engine import Event, Failed, Outcome, Ready, Request, Served, Waiting
from repro.runners.serving.loop import Answered, Lost, Result, serve
from repro.runners.serving.workload import sources_of
from traces import GeneratorSettings, TraceWorkflow, arrivals, generate

WORKFLOWS = generate(GeneratorSettings(vocab=50, scale=256, workflows=2))


@dataclass
class Time:
    """Seconds that pass when somebody works or sleeps."""

    now: float = 100.0
    slept: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@dataclass
class Fixed:
    """Serves one request per step in ``service`` seconds; ``capture`` seconds do not count."""

    time: Time
    clock: Clock
    service: float = 1.0
    capture: float = 0.0
    fails: frozenset[str] = frozenset()
    order: list[str] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)

    def submit(self, request: Request, arrival: float) -> None:
        self.queue.append(request)

    def busy(self) -> bool:
        return bool(self.queue)

    def step(self) -> Sequence[Outcome]:
        request, started = self.queue.popleft(), self.clock.now()
        self.order.append("/".join(request.key))
        self.time.now += self.service
        if request.turn.node.name in self.fails:
            return [Failed(request, self.clock.now(), "broken")]
        with self.clock.paused():
            self.time.now += self.capture
        now = self.clock.now()
        return [Served(request, started, now, now, (), {})]

    def close(self) -> None:
        self.queue.clear()


def requests(
    workflows: Sequence[TraceWorkflow] = WORKFLOWS, *, wait: bool = False
) -> list[Request]:
    return [
        Request(flow, turn, i, turn.prompt, {}, sources_of(flow)[turn.node.name] if wait else ())
        for flow in workflows
        for i, turn in enumerate(flow.turns)
    ]


def run(
    law: str,
    qps: float,
    kind: ClockKind = "virtual",
    *,
    limit: float | None = None,
    wait: bool = False,
    **engine: object,
) -> tuple[list[Result], Time, Fixed]:
    time = Time()
    clock = Clock(kind, source=time, sleep=time.sleep)
    fixed = Fixed(time, clock, **engine)  # type: ignore[arg-type]
    due = arrivals(WORKFLOWS, law, qps)  # type: ignore[arg-type]
    return serve(fixed, requests(wait=wait), due, clock, limit=limit), time, fixed


def ttfts(results: Sequence[Result]) -> list[float]:
    return [r.served.first_token - r.arrival for r in results if isinstance(r, Answered)]


@pytest.mark.parametrize("qps", [4.0, 0.5])
def test_both_clocks_give_the_same_times(qps: float) -> None:
    """Busy at 4 requests per second; at one in two seconds the wall clock has to wait."""
    virtual, _, _ = run("even", qps, "virtual")
    wall, time, _ = run("even", qps, "wall")
    assert ttfts(virtual) == pytest.approx(ttfts(wall))
    assert (time.slept > 0) == (qps < 1)


def test_ttft_counts_from_the_intended_arrival() -> None:
    results, _, _ = run("even", 4.0)
    # Request k is due at k/4 and done at k + 1.
    assert ttfts(results) == pytest.approx([k + 1 - k / 4 for k in range(8)])
    assert [r.served.started for r in results if isinstance(r, Answered)] == list(range(8))


def test_the_virtual_clock_skips_idle_time_and_nothing_else() -> None:
    results, time, _ = run("even", 0.5)
    assert time.slept == 0 and time.now == pytest.approx(100 + 8)
    assert ttfts(results) == pytest.approx([1.0] * 8)


@pytest.mark.parametrize("kind", ["virtual", "wall"])
def test_captures_do_not_count(kind: ClockKind) -> None:
    plain, _, _ = run("even", 4.0, kind)
    captured, _, _ = run("even", 4.0, kind, capture=3.0)
    assert ttfts(captured) == pytest.approx(ttfts(plain))


def test_a_single_stream_has_no_queue() -> None:
    results, _, _ = run("even", 0.0)
    assert ttfts(results) == pytest.approx([1.0] * 8)
    assert [r.arrival for r in results if isinstance(r, Answered)] == pytest.approx(range(8))


def test_a_hop_is_released_when_the_one_before_it_has_ended() -> None:
    results, _, fixed = run("workflow", 8.0)
    by_key = {r.served.request.key: r for r in results if isinstance(r, Answered)}
    for flow in WORKFLOWS:
        for before, after in zip(flow.turns, flow.turns[1:], strict=False):
            first, second = (
                by_key[flow.request, turn.node.name]  # type: ignore[index]
                for turn in (before, after)
            )
            assert second.arrival == first.served.finished
    assert len(fixed.order) == 8


def test_a_request_waits_for_its_sources_and_the_wait_counts() -> None:
    """An engine that works backwards would serve A1 before A0."""

    class Backwards(Fixed):
        def submit(self, request: Request, arrival: float) -> None:
            self.queue.appendleft(request)

    time = Time()
    clock = Clock("virtual", source=time)
    flow = WORKFLOWS[:1]
    for wait in (False, True):
        engine = Backwards(time, clock)
        results = serve(engine, requests(flow, wait=wait), arrivals(flow, "even", 1e6), clock)
        nodes = [name.partition("/")[2] for name in engine.order]
        assert (nodes == ["A0", "A1", "A2", "A3"]) == wait
        assert all(isinstance(result, Answered) for result in results)
    released = [r.released for r in results if isinstance(r, Answered)]
    assert released == sorted(released) and released[-1] > 0


def test_a_source_can_be_ready_before_its_turn_has_ended() -> None:
    """As on vLLM, where the plug-in finishes with a turn one step after its tokens."""

    class Late(Fixed):
        def step(self) -> Sequence[Event]:
            (outcome,) = super().step()
            assert isinstance(outcome, Served)
            ready = Ready(outcome.request, outcome.finished)
            return [ready, replace(outcome, finished=outcome.finished + 0.5)]

    time = Time()
    clock = Clock("virtual", source=time)
    flow = WORKFLOWS[:1]
    results = serve(Late(time, clock), requests(flow, wait=True), arrivals(flow, "even", 8), clock)
    assert [r.released for r in results if isinstance(r, Answered)] == pytest.approx([0, 1, 2, 3])


def test_requests_begin_in_the_order_of_their_intended_arrival() -> None:
    """One that waited for its source is not overtaken by what arrived meanwhile."""
    waiting, (first, second, third) = Waiting(), requests()[:3]
    for request, arrival in ((third, 2.0), (first, 1.0), (second, 1.0)):
        waiting.add(request, arrival)
    assert [waiting.pop() for _ in range(len(waiting))] == [first, second, third]


def test_sources_are_the_last_holders() -> None:
    needs = sources_of(WORKFLOWS[0])
    assert needs["A0"] == ()
    assert [key.node for key in needs["A1"]] == ["A0"]
    assert {key.node for key in needs["A3"]} == {"A2"}, "A2 read everything last, its output too"


def test_a_failed_request_is_counted_and_the_others_go_on() -> None:
    results, _, _ = run("even", 4.0, fails=frozenset({"A1"}), wait=True)
    lost = [r for r in results if isinstance(r, Lost)]
    assert [(one.state, one.reason) for one in lost] == [("failed", "broken")] * 2
    assert len(ttfts(results)) == 6


def test_what_is_open_at_the_limit_is_unfinished() -> None:
    results, _, _ = run("even", 4.0, limit=2.5)
    lost = [r for r in results if isinstance(r, Lost)]
    assert len(lost) == 5
    assert {one.reason for one in lost} == {"limit of 2.5 s"}
    assert {one.state for one in lost} == {"unfinished"}


def test_a_follower_of_a_request_that_never_ends_never_arrives() -> None:
    results, _, _ = run("workflow", 8.0, limit=0.5)
    arrived: Mapping[bool, int] = {
        known: sum((r.arrival is not None) == known for r in results) for known in (True, False)
    }
    assert arrived[False] > 0 and arrived[True] > 0


def test_an_unknown_clock_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="unknown clock 'sun'"):
        Clock("sun")  # type: ignore[arg-type]
