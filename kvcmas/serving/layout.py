"""Where a token's key and value lie in vLLM's paged cache: the one module that knows.

Writing goes through the attention backend's own update, which takes any rows. Reading has no such
call, and the cache's logical view ``[blocks, kv_heads, block, 2 head_dim]`` does not say where a
single row is: the CPU backend stores keys transposed, CUDA backends permute dimensions. So a probe
writes numbered rows into a block of the same strides and looks where they went. Reads then follow
the map, whatever the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcmas.errors import UserError

# Numbers are written digit by digit: integers up to 256 are exact in bf16, fp16 and fp32.
_BASE = 200


@dataclass(frozen=True)
class Placement:
    """Storage offsets of entries from their block's start, ``k, v [kv_heads, block, head_dim]``."""

    k: Tensor
    v: Tensor

    @classmethod
    def probe(cls, layer: Any) -> Placement:
        """Find it for the attention ``layer``, a vLLM ``Attention`` with its cache.

        Raises:
            UserError: rows overlap or vanish (a quantised or compressed cache).
        """
        cache: Tensor = layer.kv_cache
        _, heads, block, width = cache.shape
        dim = width // 2
        shape, strides = cache.shape[1:], cache.stride()[1:]
        span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        numbers = torch.arange(2 * heads * block * dim, device=cache.device)
        found = torch.zeros(span, dtype=torch.long, device=cache.device)
        written = torch.ones(span, dtype=torch.bool, device=cache.device)
        digits, value = numbers, 1
        while value == 1 or bool(digits.any()):
            probe = torch.zeros(span, dtype=cache.dtype, device=cache.device)
            rows = (digits % _BASE + 1).to(cache.dtype).view(2, block, heads, dim)
            layer.impl.do_kv_cache_update(
                layer,
                rows[0].contiguous(),
                rows[1].contiguous(),
                probe.as_strided((1, *shape), (span, *strides)),
                torch.arange(block, device=cache.device),
            )
            written &= probe != 0
            found += (probe.round().long() - 1) * value
            digits, value = digits // _BASE, value * _BASE
        at = written.nonzero().squeeze(1)
        if not torch.equal(found[at].sort().values, numbers):
            raise UserError("this KV cache does not hold plain rows; use --kv-cache-dtype auto")
        offsets = torch.empty_like(numbers)
        offsets[found[at]] = at
        k, v = offsets.view(2, block, heads, dim).transpose(1, 2)
        return cls(k.contiguous(), v.contiguous())


class PagedRows:
    """Rows of one layer's K or V, addressed by block and offset within it.

    Args:
        cache: the layer's cache; it is read in place, and what is read are copies.
        offsets: storage offsets within a block, ``[kv_heads, block, head_dim]``.
    """

    def __init__(self, cache: Tensor, offsets: Tensor) -> None:
        self._shape = tuple(offsets.shape)
        start, strides = _linear(offsets)
        self._view: Tensor | None = None
        if strides is not None:
            self._view = cache.as_strided(
                (cache.shape[0], *offsets.shape),
                (cache.stride(0), *strides),
                cache.storage_offset() + start,
            )
        else:
            span = int(offsets.max()) + 1
            self._blocks = cache.as_strided(
                (cache.shape[0], span), (cache.stride(0), 1), cache.storage_offset()
            )
            self._offsets = offsets

    def scattered(self, blocks: Tensor, at: Tensor) -> Tensor:
        """Rows ``at [rows]`` of ``blocks [rows]``, as ``[kv_heads, rows, head_dim]``."""
        if self._view is not None:
            return self._view[blocks, :, at].transpose(0, 1)
        return self._blocks[blocks[None, :, None], self._offsets[:, at]]

    def whole(self, blocks: Tensor) -> Tensor:
        """All rows of ``blocks [blocks]``, as ``[kv_heads, blocks * block, head_dim]``."""
        heads, block, dim = self._shape
        if self._view is not None:
            rows = self._view[blocks]
        else:
            rows = self._blocks[blocks][:, self._offsets.flatten()].view(-1, heads, block, dim)
        return rows.transpose(0, 1).reshape(heads, -1, dim)


def _linear(offsets: Tensor) -> tuple[int, tuple[int, ...] | None]:
    """Start and strides of offsets that are linear in their indices; None for strides if not."""
    start = int(offsets[0, 0, 0])
    strides = tuple(
        int(offsets.select(axis, 1).flatten()[0]) - start if size > 1 else 0
        for axis, size in enumerate(offsets.shape)
    )
    expected = torch.full_like(offsets, start)
    for axis, (size, stride) in enumerate(zip(offsets.shape, strides, strict=True)):
        steps = torch.arange(size, device=offsets.device) * stride
        expected += steps.view([-1 if a == axis else 1 for a in range(offsets.dim())])
    return start, strides if torch.equal(expected, offsets) else None
