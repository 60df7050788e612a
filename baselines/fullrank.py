"""Full-dimensional caches and deltas, as the methods before KVCMAS store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.engine.cache import SegmentCache

# Tokens handled at once: temporaries stay far below one layer's K and V, and in a CPU's cache.
BLOCK = 512


@dataclass(frozen=True)
class Pair:
    """Keys and values of a segment, or what is added to them.

    Both ``[layers, kv_heads, tokens, head_dim]``, keys canonical. Deltas start at layer 1: that of
    layer 0 is zero.
    """

    k: Tensor
    v: Tensor

    def __len__(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.k.nbytes + self.v.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Named tensors, for checkpoints."""
        return {"k": self.k, "v": self.v}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Pair:
        """Inverse of :meth:`tensors`."""
        return cls(tensors["k"], tensors["v"])

    @classmethod
    def delta(cls, target: SegmentCache, source: SegmentCache) -> Pair:
        """What turns ``source`` into ``target``, layers from 1."""
        return cls(target.k[1:] - source.k[1:], target.v[1:] - source.v[1:])


@dataclass(frozen=True)
class WeightedDeltas:
    """``sum_v w_v delta_v`` with a weight per token, K and V apart.

    ``weights_k, weights_v [deltas, rows]`` fp32; every delta covers the ``rows``; ``used`` are the
    requests whose use counts grow.
    """

    rows: int
    weights_k: Tensor
    weights_v: Tensor
    deltas: Sequence[Pair]
    used: tuple[str, ...] = ()

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add the delta of ``layer`` (from 1) in place, block by block, one delta at a time."""
        for target, weights, deltas in (
            (k, self.weights_k, [delta.k for delta in self.deltas]),
            (v, self.weights_v, [delta.v for delta in self.deltas]),
        ):
            for start in range(0, self.rows, BLOCK):
                part = slice(start, min(start + BLOCK, self.rows))
                total = target[:, part].float()
                for weight, delta in zip(weights, deltas, strict=True):
                    total.addcmul_(delta[layer - 1, :, part].float(), weight[part, None])
                target[:, part] = total


def value_distances(v: Tensor, bases: Sequence[Pair]) -> Tensor:
    """Frobenius distances of ``v [layers, kv_heads, tokens, head_dim]`` to the bases' values.

    Over all layers and the tokens of ``v``, which every base covers. Differences in fp32, sums in
    fp64: rounding must not make ties. Returns ``[bases]``, fp64.
    """
    rows = v.shape[2]
    total = torch.zeros(len(bases), dtype=torch.float64, device=v.device)
    for i, base in enumerate(bases):
        for layer in range(v.shape[0]):
            for start in range(0, rows, BLOCK):
                part = slice(start, min(start + BLOCK, rows))
                difference = v[layer, :, part].float() - base.v[layer, :, part].float()
                total[i] += difference.square_().sum(dtype=torch.float64)
    return total.sqrt()


def token_weights(kv: Tensor, bases: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
    """Softmax over bases of the mean absolute distance per token, ``[bases, tokens]`` fp32.

    ``kv`` and the bases are ``[layers, kv_heads, tokens, head_dim]``, the bases no shorter.
    """
    layers, heads, rows, dim = kv.shape
    distances = torch.zeros(len(bases), rows, device=kv.device)
    for i, base in enumerate(bases):
        for layer in range(layers):
            for start in range(0, rows, BLOCK):
                part = slice(start, min(start + BLOCK, rows))
                difference = kv[layer, :, part].float() - base[layer, :, part].float()
                distances[i, part] += difference.abs_().sum(dim=(0, 2))
    distances /= layers * heads * dim
    return torch.softmax(-distances / temperature, dim=0)
