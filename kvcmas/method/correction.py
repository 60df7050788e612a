"""Corrections interpolated from anchors: how deltas are weighted and added (paper A.3, Eq. 8).

``distance`` is the paper's weighting. The other three are ours, off by default, and ask which part
of it matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcmas.engine.cache import SegmentCache
from kvcmas.pool.lowrank import (
    BLOCK,
    FactorPair,
    Factors,
    flat,
    prefix_distances,
    token_distances,
    weighted_sum,
)

Weights = Literal["distance", "uniform", "nearest_anchor", "token_knn"]

# Distances held at once while tokens are matched: 64 MiB in fp32, whatever the pool.
MATCHED = 1 << 24


@dataclass(frozen=True)
class LowRankCorrection:
    """``sum_v w_v A_v B_v`` with weights per token, K and V apart (Eq. 8).

    ``weights_k, weights_v [anchors, rows]``; ``used`` are the requests whose use counts grow.
    """

    rows: int
    weights_k: Tensor
    weights_v: Tensor
    deltas: Sequence[FactorPair]
    used: tuple[str, ...]

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add the delta of ``layer`` (from 1) in place, block by block."""
        for target, weights, deltas in (
            (k, self.weights_k, [delta.k for delta in self.deltas]),
            (v, self.weights_v, [delta.v for delta in self.deltas]),
        ):
            for part, delta in weighted_sum(weights, deltas, layer - 1):
                _add(target, part, delta)


@dataclass(frozen=True)
class Matches:
    """Per anchor, the ``[matches]`` tokens of a segment, their counterparts and weights."""

    tokens: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


@dataclass(frozen=True)
class TokenCorrection:
    """``token_knn``: each token takes the deltas of the anchor tokens that resemble it most.

    Attributes:
        rows: all tokens; content has no length to be covered.
        used: the requests whose use counts grow.
    """

    rows: int
    matches_k: Matches
    matches_v: Matches
    deltas: Sequence[FactorPair]
    used: tuple[str, ...]

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add the delta of ``layer`` (from 1) in place, block by block."""
        for target, matches, deltas in (
            (k, self.matches_k, [delta.k for delta in self.deltas]),
            (v, self.matches_v, [delta.v for delta in self.deltas]),
        ):
            left = []
            for n, delta in enumerate(deltas):
                taken = delta.a[layer - 1][matches.positions[n]].float()
                sums = taken.new_zeros(self.rows, taken.shape[1])
                sums.index_add_(0, matches.tokens[n], taken * matches.weights[n][:, None])
                left.append(sums)
            a, b = torch.cat(left, dim=1), torch.cat([d.b[layer - 1].float() for d in deltas])
            for start in range(0, self.rows, BLOCK):
                part = slice(start, min(start + BLOCK, self.rows))
                _add(target, part, a[part] @ b)


def interpolate(
    cache: SegmentCache,
    bases: Sequence[FactorPair],
    deltas: Sequence[FactorPair],
    rows: int,
    used: tuple[str, ...],
    weighting: Weights = "distance",
    temperature: float = 1.0,
) -> LowRankCorrection:
    """Correction of the first ``rows`` tokens by position: token u takes deltas of tokens u.

    ``distance``: softmax of ``-d / temperature`` per token, d the mean absolute distance to each
    reconstructed base, keys and values apart. ``uniform``: the mean delta, whatever the content.
    ``nearest_anchor``: all tokens take the delta of the one anchor whose values are nearest as the
    gate measures it (Eq. 9). An anchor weighs nothing where it has no token.
    """
    if weighting == "distance":
        distances = [
            token_distances(cache.k, [base.k for base in bases], rows),
            token_distances(cache.v, [base.v for base in bases], rows),
        ]
    else:
        preferred = torch.zeros(len(bases), rows, device=cache.v.device)
        if weighting == "nearest_anchor":
            gate = prefix_distances(cache.v, [base.v for base in bases], rows)
            preferred[torch.arange(len(bases), device=gate.device) != gate.argmin()] = torch.inf
        for row, base in zip(preferred, bases, strict=True):
            row[len(base.v) :] = torch.inf
        distances = [preferred, preferred]
    weights_k, weights_v = (torch.softmax(-d / temperature, dim=0) for d in distances)
    return LowRankCorrection(rows, weights_k, weights_v, deltas, used)


def match_tokens(
    cache: SegmentCache,
    bases: Sequence[FactorPair],
    deltas: Sequence[FactorPair],
    used: tuple[str, ...],
    neighbours: int,
    temperature: float = 1.0,
) -> TokenCorrection:
    """Correction by content: each token is matched with tokens of all anchors, at any position.

    Keys and values apart, a token takes the ``neighbours`` anchor tokens at the smallest root mean
    square distance over all layers, heads and dims between its row of ``cache`` and theirs in the
    reconstructed bases, and the softmax of ``-d / temperature`` over them weighs their deltas.
    Values know no position at all. Keys hold the rotation to their place within the segment, which
    is part of what is compared, so that keys prefer neighbours whose delta points the same way.
    """
    return TokenCorrection(
        rows=len(cache),
        matches_k=_match(cache.k, [base.k for base in bases], neighbours, temperature),
        matches_v=_match(cache.v, [base.v for base in bases], neighbours, temperature),
        deltas=deltas,
        used=used,
    )


def _match(kv: Tensor, bases: Sequence[Factors], neighbours: int, temperature: float) -> Matches:
    layers, heads, tokens, dim = kv.shape
    lengths = [len(base) for base in bases]
    norms = [
        torch.stack([base.matrix(layer).square().sum(1) for layer in range(layers)]).sum(0)
        for base in bases
    ]
    index, weights = [], []
    step = max(1, MATCHED // sum(lengths))
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        squared = torch.cat(norms).expand(part.stop - part.start, -1).clone()
        for layer in range(layers):
            x = flat(kv[layer, :, part]).float()
            squared += x.square().sum(1, keepdim=True)
            for base, columns in zip(bases, squared.split(lengths, dim=1), strict=True):
                projected = x @ base.b[layer].float().T
                columns.addmm_(projected, base.a[layer].float().T, alpha=-2)
        nearest = squared.topk(min(neighbours, sum(lengths)), dim=1, largest=False)
        distance = (nearest.values.clamp_min(0) / (layers * heads * dim)).sqrt()
        index.append(nearest.indices)
        weights.append(torch.softmax(-distance / temperature, dim=1))
    return _by_anchor(torch.cat(index), torch.cat(weights), lengths)


def _by_anchor(index: Tensor, weights: Tensor, lengths: Sequence[int]) -> Matches:
    """Split ``index, weights [tokens, neighbours]``, indices into all anchors' joined tokens."""
    tokens, positions, parts = [], [], []
    first = 0
    for length in lengths:
        at = (index >= first) & (index < first + length)
        tokens.append(at.nonzero()[:, 0])
        positions.append(index[at] - first)
        parts.append(weights[at])
        first += length
    return Matches(tuple(tokens), tuple(positions), tuple(parts))


def _add(target: Tensor, part: slice, delta: Tensor) -> None:
    """Add ``delta [tokens, D]`` to the tokens ``part`` of ``target [heads, tokens, dim]``."""
    heads, _, dim = target.shape
    target[:, part] += delta.unflatten(1, (heads, dim)).transpose(0, 1).to(target.dtype)
