"""The vLLM engine: the method runs in vLLM's own batches, behind the connector of kvcmas.serving.

Tokens count as given out at the end of the step that made them. The plug-in finishes with a turn in
a later step: anchors are built there and pass on the clock, the caches of recorded outputs are made
there as well and do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

import torch

from kvcmas.engine.adapter import ModelSpec, TransformersAdapter
from kvcmas.engine.contract import Method, State
from kvcmas.errors import UserError
from kvcmas.serving.host import Emitted, Host, HostOptions
from kvcmas.serving.params import TurnParams
from kvcmas.serving.report import TurnReport
from repro.models import ResolvedModel, load
from repro.models.loading import DType
from repro.runners.rows import edges_of, measured_of
from repro.runners.serving.backend import Sketch
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Event, Failed, Ready, Request, Served, Waiting
from repro.runners.serving.pools import check_reset
from traces.schema import TurnKey

# Longest requests that vLLM's cache holds at a time; more of them wait in its queue.
RESIDENT = 8


@dataclass
class _Open:
    """A request that vLLM or the plug-in is not done with."""

    request: Request
    started: float = 0.0
    token_times: list[float] = field(default_factory=list)


class VLLMEngine:
    """See :class:`~repro.runners.serving.engine.ServingEngine`; made by :class:`VLLMBackend`."""

    def __init__(self, host: Host, clock: Clock, *, topology: str, decode: bool) -> None:
        self._host = host
        self._clock = clock
        self._topology = topology
        self._decode = decode
        self._waiting = Waiting()
        self._by_id: dict[str, TurnKey] = {}
        self._open: dict[TurnKey, _Open] = {}

    def submit(self, request: Request, arrival: float) -> None:
        """See the protocol."""
        self._waiting.add(request, arrival)

    def busy(self) -> bool:
        """See the protocol."""
        return len(self._waiting) > 0 or self._host.busy

    def _hand_over(self, request: Request) -> None:
        turn, name = request.turn, request.workflow.request
        params = TurnParams.of(
            request.workflow.workflow(self._topology),
            turn.node,
            name,
            request.prompt,
            force=request.force,
            output=None if self._decode else turn.output,
        )
        forced = turn.output if self._decode else None
        handle = self._host.submit(
            request.prompt.ids,
            params,
            max_tokens=len(forced) if forced else 1,
            output=forced,
        )
        self._by_id[handle] = request.key
        self._open[request.key] = _Open(request)

    def step(self) -> Sequence[Event]:
        """One step of vLLM, whose own queue is kept as short as its token budget allows."""
        began = self._clock.now()
        budget = self._host.options.max_num_batched_tokens
        while len(self._waiting) and self._unanswered_tokens() < budget:
            self._hand_over(self._waiting.pop())
        step = self._host.step()
        for report in step.reports:
            self._clock.exclude(report.seconds.extend + report.seconds.capture)
        now = self._clock.now()
        events: list[Event] = []
        for emitted in step.emitted:
            events += self._tokens(emitted, began, now)
        for report in step.reports:
            events += self._ended(report, now)
        return events

    def close(self) -> None:
        """Take back what has not ended."""
        self._waiting.clear()
        for handle in self._by_id:
            self._host.abort(handle)
        self._by_id.clear()
        self._open.clear()

    def _unanswered_tokens(self) -> int:
        """Prompt tokens of the requests that vLLM has and that have no first token yet."""
        return sum(len(o.request.prompt) for o in self._open.values() if not o.token_times)

    def _tokens(self, emitted: Emitted, began: float, now: float) -> list[Event]:
        key = self._by_id[emitted.request]
        found = self._open[key]
        if emitted.first:
            found.started = began
        found.token_times += [now] * len(emitted.token_ids)
        if emitted.finish is None:
            return []
        del self._by_id[emitted.request]
        if emitted.finish in ("abort", "error"):
            del self._open[key]
            return [Failed(found.request, now, f"vLLM ended it: {emitted.finish}")]
        # The plug-in makes its caches before any turn of the same workflow that starts from now on.
        return [Ready(found.request, now)]

    def _ended(self, report: TurnReport, now: float) -> list[Event]:
        found = self._open.pop(TurnKey(report.request, report.node), None)
        if found is None or not found.token_times:  # aborted
            return []
        request = found.request
        with self._clock.paused():
            fields = measured_of(request.prompt, report, self._host.state())
            fields["edges"] = tuple(edges_of(request.prompt, report))
            fields["times_s"] = asdict(report.seconds)
        return [
            Served(
                request,
                found.started,
                found.token_times[0],
                now,
                tuple(found.token_times) if self._decode else (),
                fields,
                report.fell_back,
            )
        ]


class VLLMBackend:
    """See :class:`~repro.runners.serving.backend.Backend`: one vLLM engine for all cells.

    Args:
        positions: longest context that will be served.
        decode: outputs will be decoded.

    Raises:
        UserError: vLLM is not installed, or does not take the model.
    """

    engine_name = "vllm"
    attention = "vllm default"

    def __init__(
        self,
        model: ResolvedModel,
        sketch: Sketch,
        dtype: DType,
        device: str,
        *,
        positions: int,
        decode: bool,
    ) -> None:
        self.sketch = sketch
        self.device = device
        self._model = model
        self._dtype: DType = dtype
        longest = min(positions + 1, sketch.spec.max_positions)
        self._host = Host(
            model.path,
            HostOptions(
                max_model_len=longest,
                kv_cache_bytes=cache_bytes(sketch.spec, longest),
                reference_prefix=sketch.reference_prefix,
                forcing=decode,
                dtype=served_dtype(sketch.spec),
            ),
        )

    @cached_property
    def adapter(self) -> TransformersAdapter:
        """See the protocol."""
        model, _ = load(self._model, dtype=self._dtype, device=self.device)
        return TransformersAdapter(model)

    def engine(
        self,
        method: Method,
        clock: Clock,
        *,
        topology: str,
        pool: State | None = None,
        decode: bool = False,
    ) -> VLLMEngine:
        """See the protocol; asserts that nothing is left of the engine before.

        Raises:
            RuntimeError: something is.
        """
        kind = type(method)
        self._host.configure(f"{kind.__module__}:{kind.__qualname__}", method.settings())
        self._host.reset()
        if pool is not None:
            self._host.load_state(pool)
        check_reset(self._host.state(), pool)
        return VLLMEngine(self._host, clock, topology=topology, decode=decode)

    def close(self) -> None:
        """See the protocol."""
        self._host.close()


def served_dtype(spec: ModelSpec) -> Literal["float32", "bfloat16"]:
    """The model's element type, as vLLM takes it.

    Raises:
        UserError: another one.
    """
    if spec.dtype == torch.float32:
        return "float32"
    if spec.dtype == torch.bfloat16:
        return "bfloat16"
    raise UserError(f"the vLLM engine serves float32 or bfloat16, not {spec.dtype}")


def cache_bytes(spec: ModelSpec, longest: int, block: int = 128) -> int:
    """Bytes of vLLM's cache for ``RESIDENT`` requests of ``longest`` tokens.

    Tokens are rounded up to whole blocks of vLLM's CPU cache, the largest that it uses.
    """
    return RESIDENT * -(-longest // block) * block * spec.kv_bytes_per_token
