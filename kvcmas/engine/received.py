"""Attention that cached tokens receive from later queries, without keeping attention weights.

Fused attention returns no weights, so the scores of the executed queries are formed once more, a
few rows at a time: memory does not grow with the number of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.engine.attention import Rows

# Scores formed at a time: few enough for a processor's cache, more where launching kernels costs.
SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}


class Received:
    """Raw sums over layers, heads and executed queries, for the rows that collect.

    Args:
        collecting: ``[capacity]`` host booleans; the other rows keep what they are given.

    Attributes:
        total: ``[capacity]`` fp32.
    """

    def __init__(self, collecting: Tensor, device: torch.device) -> None:
        self.total = torch.zeros(len(collecting), device=device)
        self._weight = collecting.to(device, torch.float32)
        # Queries before the first collecting row cannot see any.
        self._first = int(collecting.int().argmax()) if collecting.any() else len(collecting)

    def reached_by(self, rows: Rows) -> bool:
        """Whether any of the queries sees a row that collects."""
        return bool((rows.host >= self._first).any())

    def observe(self, q: Tensor, rows: Rows, k: Tensor) -> None:
        """Add what one layer's rotated queries ``[heads, rows, head_dim]`` of ``rows`` give.

        ``k`` is that layer of the buffer, ``[kv_heads, capacity, head_dim]``, keys at position.
        """
        if not self.reached_by(rows):
            return
        skipped = int(torch.searchsorted(rows.host, self._first))
        heads, _, dim = q.shape
        groups, keys = k.shape[0], int(rows.host[-1]) + 1
        q, k = q.float() * dim**-0.5, k[:, :keys].float().mT
        step = max(1, SCORES.get(k.device.type, SCORES["cuda"]) // (heads * keys))
        for start in range(skipped, len(rows), step):
            part = slice(start, min(start + step, len(rows)))
            first, seen = int(rows.host[part.start]), int(rows.host[part.stop - 1]) + 1
            scores = (q[:, part].reshape(groups, -1, dim) @ k[..., :seen]).view(heads, -1, seen)
            # Keys up to the first query are seen by all.
            late = torch.arange(first + 1, seen, device=k.device) > rows.positions[part, None]
            scores[..., first + 1 :].masked_fill_(late, -torch.inf)
            given = scores.softmax(dim=-1).sum(dim=(0, 1))
            self.total[:seen].addcmul_(given, self._weight[:seen])
