"""What the machine does per second, measured in the run whose times it explains."""

from __future__ import annotations

import torch

from kvcmas.engine.adapter import ModelSpec
from repro.runners.estimate import calls_per_second
from results.stream_schema import Rates

# Rows of the product; prompts have more, but the rate has settled long before.
_ROWS = 1024


def measure_rates(spec: ModelSpec, rows: int, seconds: float = 0.3) -> Rates:
    """Rates of the model's device in its dtype, in about twice ``seconds``.

    Args:
        rows: tokens of the context whose K and V are copied.
    """
    device = str(spec.device)
    hidden = torch.randn(_ROWS, spec.hidden, device=device).to(spec.dtype)
    weights = torch.randn(spec.hidden, spec.ffn, device=device).to(spec.dtype)
    products = calls_per_second(lambda _: hidden @ weights, device, seconds)
    source = torch.zeros(2, spec.kv_heads, rows, spec.head_dim, dtype=spec.dtype, device=device)
    target = torch.empty_like(source)
    copies = calls_per_second(lambda _: target.copy_(source), device, seconds)
    return Rates(
        flops_per_s=2 * _ROWS * spec.hidden * spec.ffn * products,
        bytes_per_s=2 * source.nbytes * copies,
    )
