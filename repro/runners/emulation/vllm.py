"""Plain vLLM with its own prefix cache, for emulated methods; no plug-in of ours is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from kvcmas.errors import UserError
from kvcmas.serving.host import Host, HostOptions
from repro.models import ResolvedModel
from repro.runners.serving.backend import Sketch
from repro.runners.serving.vllm import cache_bytes, served_dtype


class VLLMPrefiller:
    """See :class:`~repro.runners.emulation.engine.Prefiller`: vLLM finds prefixes by content.

    Cached are whole blocks (128 tokens on a CPU), so a hit can be one block shorter than planned.

    Raises:
        UserError: vLLM is not installed, or does not take the model.
    """

    engine_name = "vllm"
    attention = "vllm default"

    def __init__(self, model: ResolvedModel, sketch: Sketch, positions: int) -> None:
        longest = min(positions + 1, sketch.spec.max_positions)
        self._host = Host(
            model.path,
            HostOptions(
                max_model_len=longest,
                kv_cache_bytes=cache_bytes(sketch.spec, longest),
                dtype=served_dtype(sketch.spec),
                stock=True,
                prefix_caching=True,
            ),
        )

    def reset(self) -> None:
        """See the protocol."""
        self._host.reset()

    def prefill(self, stream: str | None, ids: Sequence[int]) -> int:
        """See the protocol.

        Raises:
            UserError: vLLM ended the request without a token.
        """
        handle = self._host.submit(ids)
        while self._host.busy:
            for emitted in self._host.step().emitted:
                if emitted.request == handle and emitted.finish is not None:
                    if emitted.finish in ("abort", "error"):
                        raise UserError(f"vLLM ended a request: {emitted.finish}")
                    return emitted.cached_tokens
        raise UserError("vLLM lost a request")

    def forget(self, stream: str) -> None:
        """Nothing to do: vLLM forgets what it has not used for longest."""

    def close(self) -> None:
        """See the protocol."""
        self._host.close()
