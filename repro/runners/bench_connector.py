"""`repro bench connector`: what the vLLM plug-in costs a request that it does not change.

NonShared through the connector against stock vLLM, on the same requests. An engine with the
connector and one without cannot share a process, so each has its own, and only one works at a time.
A second stock engine is the A/A control: the difference that the same thing shows from itself.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from transformers import AutoConfig

from kvcmas.engine.workflow import Workflow
from kvcmas.errors import UserError
from kvcmas.serving.host import Host, HostOptions
from kvcmas.serving.params import TurnParams
from results.goals import BenchRow
from traces.generator import GeneratorSettings, Seeds, generate
from traces.schema import TraceTurn

Engine = Literal["stock", "control", "connector"]
ENGINES: tuple[Engine, ...] = ("stock", "control", "connector")
# The connector may cost this share of a stock request (median of the paired ratios).
LIMIT = 1.03


@dataclass(frozen=True)
class Request:
    """One agent turn of a generated workflow."""

    workflow: str
    graph: Workflow
    turn: TraceTurn


def bench_connector(
    directory: Path,
    *,
    shared: int = 2048,
    requests: int = 32,
    seed: int = 0,
    on_step: Callable[[str], None] = lambda step: None,
) -> tuple[BenchRow, ...]:
    """Serve ``requests`` turns of layout T one at a time on every engine, in changing order.

    Each turn reads ``shared`` tokens and what earlier agents wrote; its ids are random. The first
    workflow of four turns is a warm-up and discarded.

    Args:
        directory: Transformers model directory.

    Raises:
        UserError: vLLM is missing, or an engine could not be made or stopped working.
    """
    settings = GeneratorSettings(
        layout="T",
        shared=shared,
        workflows=1 + -(-requests // 4),
        vocab=AutoConfig.from_pretrained(directory).vocab_size,
        seeds=Seeds.all(seed),
    )
    turns = [
        Request(workflow.request, settings.graph, turn)
        for workflow in generate(settings)
        for turn in workflow.turns
    ][: requests + 4]
    longest = max(len(request.turn.prompt) for request in turns) + 1
    ttft: dict[Engine, list[float]] = {engine: [] for engine in ENGINES}
    with _engines(directory, longest, on_step) as served:
        for i, request in enumerate(turns):
            on_step(f"request {i - 3} of {requests}" if i >= 4 else "warm-up")
            # Every engine is first, second and last equally often, so that drift cancels.
            for engine in (*ENGINES[i % 3 :], *ENGINES[: i % 3]):
                seconds = served[engine].serve(request)
                if i >= 4:
                    ttft[engine].append(seconds)
    stock = ttft["stock"]
    return (
        BenchRow.paired("stock vLLM again (A/A control)", ttft["control"], stock),
        BenchRow.paired("NonShared through the connector", ttft["connector"], stock, LIMIT),
    )


class _Remote:
    """An engine in a process of its own."""

    def __init__(self, engine: Engine, directory: Path, longest: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_work, args=(other, directory, longest, engine != "connector"), daemon=True
        )
        self._process.start()
        other.close()

    def ready(self) -> None:
        self._answer()

    def serve(self, request: Request) -> float:
        self._connection.send(request)
        return self._answer()

    def close(self) -> None:
        self._connection.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.terminate()

    def _answer(self) -> float:
        try:
            answer = self._connection.recv()
        except EOFError as error:
            raise UserError("a vLLM process ended by itself; its output says why") from error
        if isinstance(answer, str):
            raise UserError(answer)
        return float(answer)


@contextmanager
def _engines(
    directory: Path, longest: int, on_step: Callable[[str], None]
) -> Iterator[dict[Engine, _Remote]]:
    made: dict[Engine, _Remote] = {}
    try:
        on_step("starting vLLM, three times")
        for engine in ENGINES:
            made[engine] = _Remote(engine, directory, longest)
        for remote in made.values():
            remote.ready()
        yield made
    finally:
        for remote in made.values():
            remote.close()


def _work(connection: Connection, directory: Path, longest: int, stock: bool) -> None:
    """The other process: make an engine, then answer requests until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C closes the pipe, that is enough
    try:
        host = Host(directory, HostOptions(max_model_len=longest, stock=stock))
        connection.send(0.0)
        while True:
            connection.send(_serve(host, connection.recv()))
    except EOFError:
        return
    except (UserError, RuntimeError, ValueError) as error:
        connection.send(str(error))


def _serve(host: Host, request: Request) -> float:
    """Seconds to the first token. What the plug-in does afterwards is waited for, not counted.

    Raises:
        RuntimeError: the plug-in refused the turn, so that nothing of it was measured.
    """
    turn = request.turn
    params = None
    if not host.options.stock:
        params = TurnParams.of(
            request.graph, turn.node, request.workflow, turn.prompt, output=turn.output
        )
    host.submit(turn.prompt.ids, params)
    steps = host.settle()
    for report in (report for step in steps for report in step.reports):
        if report.fell_back:
            raise RuntimeError(f"the plug-in refused a turn: {report.fell_back}")
    first = next(step.ended for step in steps if any(e.first for e in step.emitted))
    return first - steps[0].started
