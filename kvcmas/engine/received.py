"""Attention that cached tokens receive from later queries, without keeping attention weights.

Fused attention returns no weights, so the scores of the executed queries are formed once more, a
few rows at a time: memory does not grow with the number of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcmas.engine.attention import Rows

# Scores of one chunk: 64 MiB in fp32, whatever the context.
SCORES = 1 << 24


class Received:
    """Raw sums over layers, heads and executed queries, for the rows that collect.

    Args:
        collecting: ``[capacity]`` host booleans; the other rows keep what they are given.

    Attributes:
        total: ``[capacity]`` fp32.
    """

    def __init__(self, collecting: Tensor, device: torch.device) -> None:
        self.total = torch.zeros(len(collecting), device=device)
        self._collecting = collecting.to(device)
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
        keys = int(rows.host[-1]) + 1
        step = max(1, SCORES // (q.shape[0] * keys))
        k = k[:, :keys].float()
        for start in range(skipped, len(rows), step):
            part = slice(start, start + step)
            given = _given(q[:, part].float(), rows.positions[part], k)
            self.total[:keys] += given.where(self._collecting[:keys], 0.0)


def _given(q: Tensor, positions: Tensor, k: Tensor) -> Tensor:
    """Attention weights per key, summed over heads and queries, ``[keys]``."""
    groups, keys, dim = k.shape
    scores = (q.reshape(groups, -1, dim) @ k.mT) * dim**-0.5
    scores = scores.view(q.shape[0], len(positions), keys)
    hidden = torch.arange(keys, device=k.device) > positions[:, None]
    return scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1).sum(dim=(0, 1))
