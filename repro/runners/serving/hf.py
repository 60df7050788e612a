"""First come, first served on the Transformers engine: for machines without vLLM.

A step serves one whole request. Its plan, prefill and anchor building pass on the cell's clock;
what only prepares the replay (feeding the recorded output, copying caches out) does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.contract import Method, State
from kvcmas.engine.session import Engine, Session, TurnResult
from kvcmas.errors import UserError
from repro.runners.rows import edge_records, measured
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Event, Failed, Request, Served, Waiting
from repro.runners.serving.pools import check_reset


class HFEngine:
    """See :class:`~repro.runners.serving.engine.ServingEngine`.

    Args:
        pool: what the method has learned before; None starts it empty.
        decode: really decode the recorded output, token by token, instead of ending a request with
            its first token.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        method: Method,
        clock: Clock,
        *,
        topology: str,
        reference_prefix: Sequence[int] = (),
        pool: State | None = None,
        decode: bool = False,
    ) -> None:
        self._engine = Engine(
            adapter, method, reference_prefix=reference_prefix, clock=clock.source
        )
        if pool is not None:
            self._engine.load_state(pool)
        check_reset(self._engine.state(), pool)
        self._clock = clock
        self._topology = topology
        self._decode = decode
        self._waiting = Waiting()
        self._sessions: dict[str, Session] = {}

    def submit(self, request: Request, arrival: float) -> None:
        """See the protocol."""
        self._waiting.add(request, arrival)

    def busy(self) -> bool:
        """See the protocol."""
        return len(self._waiting) > 0

    def step(self) -> Sequence[Event]:
        """Serve the request that was to arrive first."""
        request = self._waiting.pop()
        try:
            return [self._serve(request)]
        except UserError:
            raise  # wrong for every request, not for this one
        except Exception as error:  # whatever a method does to one request, the others go on
            return [Failed(request, self._clock.now(), f"{type(error).__name__}: {error}")]
        finally:
            if request.last:
                self._sessions.pop(request.workflow.request, None)

    def close(self) -> None:
        """See the protocol."""
        self._waiting.clear()
        self._sessions.clear()

    def _serve(self, request: Request) -> Served:
        workflow, turn, clock = request.workflow, request.turn, self._clock
        name = workflow.request
        if name not in self._sessions:
            graph = workflow.workflow(self._topology)
            self._sessions[name] = self._engine.session(graph, name)
        result = self._sessions[name].run(
            turn.node,
            request.prompt,
            max_new_tokens=len(turn.output),
            output=turn.output,
            force=request.force,
            logits=0,
            keep_buffer=self._decode,
        )
        # The turn's own clock began here; what it did before (background references) kept the
        # engine busy all the same.
        started = clock.now() - result.times.e2e
        clock.exclude(result.times.decode + result.times.capture)
        first_token = started + result.times.ttft
        token_times = self._decode_steps(result, first_token) if self._decode else ()
        finished = clock.now()
        with clock.paused():
            fields = measured(result, self._engine)
            fields["edges"] = tuple(edge_records(result))
            times = asdict(result.times)
            fields["times_s"] = times | {"decode": sum(b - a for a, b in pairwise(token_times))}
        return Served(request, started, first_token, finished, token_times, fields)

    def _decode_steps(self, result: TurnResult, first_token: float) -> tuple[float, ...]:
        """Feed the recorded output one token at a time, as decoding does; when each token came.

        The session has fed it in one go to leave source caches; the steps write those rows again.
        """
        if result.buffer is None:
            raise ValueError("decoding needs the turn's buffer")
        result.buffer.length = len(result.prompt)
        times = [first_token]
        for token in result.output[:-1]:
            self._engine.executor.extend(result.buffer, [token])
            self._engine.now()  # waits for the device
            times.append(self._clock.now())
        return tuple(times)
