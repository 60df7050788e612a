"""Decoding that is made to take recorded ids, for replays that really decode.

For vLLM's V1 model runner, which CPUs use. Its V2 runner has another interface and refuses this
class; there ``VLLM_USE_V2_MODEL_RUNNER=0`` brings V1 back.
"""

from __future__ import annotations

import math

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

# The key in SamplingParams.extra_args.
FORCE = "force_ids"


class ForcedIds(AdapterLogitsProcessor):
    """Token t of a request is ``extra_args["force_ids"][t]``; beyond its end nothing is forced."""

    def is_argmax_invariant(self) -> bool:
        """See vLLM; it changes what greedy decoding takes."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The request's own processor, or None for a request that is not forced."""
        ids: list[int] | None = (params.extra_args or {}).get(FORCE)
        if not ids:
            return None

        def force(output_ids: list[int], logits: Tensor) -> Tensor:
            if len(output_ids) < len(ids):
                forced = logits.new_full(logits.shape, -math.inf)
                forced[ids[len(output_ids)]] = 0.0
                return forced
            return logits

        return force
