"""Attention of any sorted set of rows over the whole buffer with the true mask key <= query."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a masked call: bounds the boolean mask to CHUNK x keys, whatever the context.
CHUNK = 512
# Above this many runs one masked call is cheaper than one call per run.
MAX_RUNS = 16


class Rows:
    """A sorted, duplicate-free set of absolute positions ``[rows]`` and its contiguous runs."""

    def __init__(self, positions: Tensor, device: torch.device) -> None:
        self.host = positions
        self.positions = positions.to(device)

    def __len__(self) -> int:
        return self.host.numel()

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Half-open intervals ``[low, high)`` that cover the set, in order."""
        if not len(self):
            return []
        breaks = (self.host.diff() != 1).nonzero().squeeze(1) + 1
        low = [0, *breaks.tolist()]
        high = [*breaks.tolist(), len(self)]
        return [
            (int(self.host[a]), int(self.host[b - 1]) + 1) for a, b in zip(low, high, strict=True)
        ]

    @property
    def attended(self) -> int:
        """Number of (query, key) pairs under the causal mask."""
        return int(self.host.sum()) + len(self)

    def scatter_(self, buffer: Tensor, fresh: Tensor) -> None:
        """Write ``fresh [heads, rows, head_dim]`` into ``buffer [heads, capacity, head_dim]``."""
        if len(self.runs) == 1:
            low, high = self.runs[0]
            buffer[:, low:high] = fresh
        else:
            buffer.index_copy_(1, self.positions, fresh)


def attend(q: Tensor, rows: Rows, k: Tensor, v: Tensor) -> Tensor:
    """Attention of rotated queries ``[heads, rows, head_dim]``.

    ``k, v`` are one layer of the buffer, ``[kv_heads, capacity, head_dim]``; a query at position p
    sees the keys at positions 0..p. Returns ``[heads, rows, head_dim]``.
    """
    if len(rows.runs) > MAX_RUNS:
        return _masked(q, rows.positions, k, v, int(rows.host[-1]) + 1)
    parts, done = [], 0
    for low, high in rows.runs:
        part = q[:, done : done + high - low]
        done += high - low
        if low == 0:
            parts.append(_sdpa(part, k[:, :high], v[:, :high], causal=True))
        elif high - low == 1:
            parts.append(_sdpa(part, k[:, :high], v[:, :high]))
        else:
            positions = torch.arange(low, high, device=q.device)
            parts.append(_masked(part, positions, k, v, high))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _masked(q: Tensor, positions: Tensor, k: Tensor, v: Tensor, keys: int) -> Tensor:
    key_positions = torch.arange(keys, device=q.device)
    parts = []
    for part, at in zip(q.split(CHUNK, dim=1), positions.split(CHUNK), strict=True):
        seen = int(at[-1]) + 1
        mask = key_positions[:seen] <= at[:, None]
        parts.append(_sdpa(part, k[:, :seen], v[:, :seen], mask=mask))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    out = F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    return out[0]
