"""The serving engine of an emulated method: plain prefills with a prefix cache, one at a time.

Nothing is aligned, spliced or corrected: requests are prompts of the charged shape, and corrections
are sums over random numbers. Answers mean nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcmas.engine.adapter import ModelSpec, TransformersAdapter
from kvcmas.engine.contract import Method, State
from repro.models import ResolvedModel, load
from repro.models.loading import DType
from repro.runners.emulation.costs import Emulated, Hop, Planner
from repro.runners.serving.backend import Sketch
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Event, Request, Served, Waiting
from results.records import EntryCounts


class Prefiller(Protocol):
    """A model with a prefix cache.

    Attributes:
        engine_name, attention: as run records have it.
    """

    engine_name: str
    attention: str

    def reset(self) -> None:
        """Forget all cached prefixes."""
        ...

    def prefill(self, stream: str | None, ids: Sequence[int]) -> int:
        """Execute a prompt to its first token; how many of its leading tokens were cached.

        Prompts that begin alike name the same ``stream``; None is one that is seen once.
        """
        ...

    def forget(self, stream: str) -> None:
        """No prompt of this stream will come any more."""
        ...

    def close(self) -> None:
        """Give the model back."""
        ...


class HFPrefiller:
    """Transformers' own forward and cache, one stream's cache at a time."""

    engine_name = "transformers"
    attention = "sdpa"

    def __init__(self, model: ResolvedModel, dtype: DType, device: str) -> None:
        self._model: Any = load(model, dtype=dtype, device=device)[0]
        self._caches: dict[str, tuple[list[int], Any]] = {}

    def reset(self) -> None:
        """See :class:`Prefiller`."""
        self._caches.clear()

    @torch.inference_mode()
    def prefill(self, stream: str | None, ids: Sequence[int]) -> int:
        """See :class:`Prefiller`."""
        held, cache = self._caches.pop(stream or "", ([], None))
        # The last token is always executed, or there would be no first one.
        hit = min(_common(held, ids), len(ids) - 1)
        if cache is not None:
            cache.crop(hit)
        left = torch.tensor([list(ids[hit:])], device=self._model.device)
        out = self._model(left, past_key_values=cache, use_cache=True, logits_to_keep=1)
        out.logits.argmax().item()  # waits for the device
        if stream is not None:
            self._caches[stream] = (list(ids), out.past_key_values)
        return hit

    def forget(self, stream: str) -> None:
        """See :class:`Prefiller`."""
        self._caches.pop(stream, None)

    def close(self) -> None:
        """See :class:`Prefiller`."""
        self._caches.clear()


class EmulatedBackend:
    """A :class:`~repro.runners.serving.backend.Backend`: methods are charged, none of them runs.

    Args:
        positions: longest prompt that will be served.
    """

    def __init__(self, prefiller: Prefiller, sketch: Sketch, device: str, positions: int) -> None:
        self.sketch = sketch
        self.device = device
        self.engine_name = prefiller.engine_name
        self.attention = prefiller.attention
        self._prefiller = prefiller
        self._positions = positions

    @property
    def adapter(self) -> TransformersAdapter:
        """There is no pool to fill.

        Raises:
            ValueError: always.
        """
        raise ValueError("an emulated method learns nothing")

    def engine(
        self,
        method: Method,
        clock: Clock,
        *,
        topology: str,
        pool: State | None = None,
        decode: bool = False,
    ) -> EmulatedEngine:
        """See the protocol; a method that is not emulated is charged as a dense one.

        Raises:
            ValueError: a pool, or outputs to decode.
        """
        if pool is not None or decode:
            raise ValueError("emulated requests end with their first token and have no pool")
        charged = method if isinstance(method, Emulated) else Emulated(reuses=False)
        self._prefiller.reset()
        add = _correction(charged, self.sketch.spec, self._positions, self.device)
        return EmulatedEngine(self._prefiller, charged, add, self.sketch, clock)

    def close(self) -> None:
        """See the protocol."""
        self._prefiller.close()


class EmulatedEngine:
    """A :class:`~repro.runners.serving.engine.ServingEngine`; :class:`EmulatedBackend` makes it."""

    def __init__(
        self,
        prefiller: Prefiller,
        method: Emulated,
        correct: Callable[[int], None],
        sketch: Sketch,
        clock: Clock,
    ) -> None:
        self._prefiller = prefiller
        self._planner = Planner(method)
        self._correct = correct
        self._spec = sketch.spec
        self._vocab = sketch.vocabulary.size
        self._clock = clock
        self._waiting = Waiting()

    def submit(self, request: Request, arrival: float) -> None:
        """See the protocol."""
        self._waiting.add(request, arrival)

    def busy(self) -> bool:
        """See the protocol."""
        return len(self._waiting) > 0

    def step(self) -> Sequence[Event]:
        """Serve the request that was to arrive first."""
        request, clock = self._waiting.pop(), self._clock
        hop, name = self._planner.hop(request), request.workflow.request
        with clock.paused():
            made = _prompts(request, hop, self._vocab)
            if hop.hit:
                # Earlier outputs are cached as if they had been decoded, as in real cells.
                self._prefiller.prefill(name, made.cached)
        started = clock.now()
        if made.encode:
            self._prefiller.prefill(None, made.encode)
        encoded = clock.now()
        if hop.hit:
            self._correct(hop.hit)
        corrected = clock.now()
        hit = self._prefiller.prefill(name if hop.stream else None, made.prompt)
        now = clock.now()
        with clock.paused():
            if request.last:
                self._prefiller.forget(name)
            times = {
                "reference": encoded - started,
                "correct": corrected - encoded,
                "prefill": now - corrected,
            }
            fields = {**_measured(request, hop, hit, self._spec), "times_s": times}
        return [Served(request, started, now, now, (), fields)]

    def close(self) -> None:
        """See the protocol."""
        self._waiting.clear()


@dataclass(frozen=True)
class _Prompts:
    """Token ids of what is sent: what is to be cached, the encode, the prompt itself."""

    cached: list[int]
    encode: list[int]
    prompt: list[int]


def _prompts(request: Request, hop: Hop, vocab: int) -> _Prompts:
    """Ids of the charged shape: the stream's are the trace's own, the others are seen once."""
    own = [i for s in request.prompt.segments if s.slot is not None for i in s.ids]
    draw = random.Random(f"{request.workflow.request} {request.position}")
    unseen = draw.choices(range(vocab), k=hop.tokens - hop.stream + hop.encode)
    return _Prompts(
        cached=own[: hop.hit],
        encode=unseen[: hop.encode],
        prompt=own[: hop.stream] + unseen[hop.encode :],
    )


def _measured(request: Request, hop: Hop, hit: int, spec: ModelSpec) -> dict[str, Any]:
    """Fields of the record. The hash is that of the trace's prompt, for which this one stands."""
    left = hop.tokens - hit
    attended = left * (hit + hop.tokens + 1) // 2
    flops = spec.layers * spec.layer_flops(left, left, attended) + 2 * spec.hidden * spec.vocab
    return {
        "prompt_sha256": request.prompt.sha256,
        "prompt_tokens": hop.tokens,
        "layers": spec.layers,
        "entries": EntryCounts(
            reused=0, corrected=0, executed=spec.layers * left, prefix_hit=spec.layers * hit
        ),
        "touched_rows": left,
        "executed_flops": flops,
        "reference_tokens": hop.encode,
        "edges": (),
        "source_bytes": 0,
        "pool_bytes": 0,
        "pool_entries": 0,
        "reference_bytes": 0,
    }


def _correction(
    method: Emulated, spec: ModelSpec, positions: int, device: str
) -> Callable[[int], None]:
    """The sum that stands for correcting a number of tokens in every layer; its result is dropped.

    ``full``: anchors ``[anchors, tokens, D]``; ``low_rank``: left factors ``[anchors, tokens,
    rank]`` and one right factor ``[rank, D]``, with D = kv_heads * head_dim. One tensor of each
    serves all layers, as in the harness.
    """
    if method.correction == "none":
        return lambda tokens: None
    generator = torch.Generator().manual_seed(0)

    def random_numbers(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(device, spec.dtype)

    width = spec.kv_heads * spec.head_dim
    inner = width if method.correction == "full" else min(method.rank, width)
    anchors, weights = (
        random_numbers(method.anchors, positions, inner),
        random_numbers(method.anchors),
    )
    right = None if method.correction == "full" else random_numbers(inner, width)

    @torch.inference_mode()
    def correct(tokens: int) -> None:
        for _ in range(spec.layers):
            total = torch.einsum("v,vsd->sd", weights, anchors[:, :tokens])
            if right is not None:
                total = total @ right
        if total.device.type == "cuda":
            torch.cuda.synchronize(total.device)

    return correct


def _common(held: Sequence[int], ids: Sequence[int]) -> int:
    """Tokens that both begin with."""
    pairs = zip(held, ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(held), len(ids)))
