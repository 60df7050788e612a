"""Gate and correction of KVComm and KVCMAS in NumPy, slow and plain, and cases to compare on.

Written from the papers' description (KVComm 2510.12872; KVCMAS section 3.3, App. A.3) in float64,
without a look at the implementation: shapes are ``[layers, kv_heads, tokens, head_dim]`` and keys
are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RefAnchor:
    """An earlier request: base cache and delta, keys and values."""

    base_k: Array
    base_v: Array
    delta_k: Array
    delta_v: Array

    @property
    def length(self) -> int:
        return self.base_v.shape[2]


@dataclass(frozen=True)
class Case:
    """A cache to correct and the anchors that may do it."""

    name: str
    k: Array
    v: Array
    anchors: tuple[RefAnchor, ...]
    threshold: float

    @property
    def length(self) -> int:
        return self.v.shape[2]


@dataclass(frozen=True)
class Outcome:
    """``dense`` is the verdict; the correction was computed whatever the verdict."""

    dense: bool
    entropy: float | None
    counts: list[int]
    k: Array
    v: Array


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=0))
    return e / e.sum(axis=0)


def entropy_of(scores: Array) -> float:
    """Normalised by log2 of the number of anchors; 0 log 0 is 0."""
    positive = scores[scores > 0]
    return float(-(positive * np.log2(positive)).sum() / np.log2(len(scores)))


def counted(scores: Array, quirk: bool) -> set[int]:
    """Which anchors a reuse counts for: the largest scores, until their sum reaches 0.9."""
    order = np.argsort(-scores, kind="stable")
    total, chosen = 0.0, list[int]()
    for i in order:
        total += scores[i]
        if total >= 0.9:
            break
        chosen.append(int(i))
    if not chosen:
        chosen = [int(i) for i in order] if quirk else [int(order[0])]
    return set(chosen)


def token_weights(x: Array, bases: Sequence[Array]) -> Array:
    """Per token, softmax of minus the mean absolute distance: ``[bases, tokens]``."""
    rows = x.shape[2]
    distances = [np.abs(x - base[:, :, :rows]).mean(axis=(0, 1, 3)) for base in bases]
    return softmax(-np.stack(distances))


def add_weighted(x: Array, weights: Array, deltas: Sequence[Array]) -> Array:
    """``x`` plus the weighted deltas on the tokens that have weights; layer 0 stays."""
    rows = weights.shape[1]
    out = x.copy()
    for weight, delta in zip(weights, deltas, strict=True):
        out[1:, :, :rows] += weight[None, None, :, None] * delta[1:, :, :rows]
    return out


def kvcomm(case: Case) -> Outcome:
    """KVComm: anchors at least as long as the cache, full tensors, counts with the quirk."""
    eligible = [i for i, a in enumerate(case.anchors) if a.length >= case.length]
    chosen = [case.anchors[i] for i in eligible]
    counts = [0] * len(case.anchors)
    entropy, dense = None, True
    if len(chosen) >= 2:
        distances = np.array(
            [np.sqrt(((case.v - a.base_v[:, :, : case.length]) ** 2).sum()) for a in chosen]
        )
        scores = softmax(-distances)
        entropy = entropy_of(scores)
        dense = entropy > case.threshold
        if not dense:
            for i in counted(scores, quirk=True):
                counts[eligible[i]] += 1
    k, v = case.k, case.v
    if chosen:
        weights_k = token_weights(case.k, [a.base_k for a in chosen])
        weights_v = token_weights(case.v, [a.base_v for a in chosen])
        k = add_weighted(case.k, weights_k, [a.delta_k for a in chosen])
        v = add_weighted(case.v, weights_v, [a.delta_v for a in chosen])
    return Outcome(dense, entropy, counts, k, v)


def truncated(x: Array, rank: int | None) -> Array:
    """Per layer, the best rank-``rank`` approximation of ``[tokens, heads * dim]``."""
    layers, heads, tokens, dim = x.shape
    out = np.empty_like(x)
    for layer in range(layers):
        matrix = x[layer].transpose(1, 0, 2).reshape(tokens, heads * dim)
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        r = len(s) if rank is None else min(rank, len(s))
        matrix = (u[:, :r] * s[:r]) @ vt[:r]
        out[layer] = matrix.reshape(tokens, heads, dim).transpose(1, 0, 2)
    return out


def kvcmas(case: Case, rank_base: int | None, rank_delta: int | None) -> Outcome:
    """KVCMAS: everything from truncated factors; the longest covered prefix is corrected."""
    anchors = [
        RefAnchor(
            truncated(a.base_k, rank_base),
            truncated(a.base_v, rank_base),
            truncated(a.delta_k, rank_delta),
            truncated(a.delta_v, rank_delta),
        )
        for a in case.anchors
    ]
    counts = [0] * len(anchors)
    entropy, dense = None, True
    if len(anchors) >= 2:
        k = min(case.length, sorted((a.length for a in anchors), reverse=True)[1])
        eligible = [i for i, a in enumerate(anchors) if a.length >= k]
        prefixes = [anchors[i].base_v[:, :, :k] for i in eligible]
        distances = np.array([np.sqrt(((case.v[:, :, :k] - p) ** 2).sum()) for p in prefixes])
        scores = softmax(-distances)
        entropy = entropy_of(scores)
        dense = entropy > case.threshold
        if not dense:
            for i in counted(scores, quirk=False):
                counts[eligible[i]] += 1
    out_k, out_v = case.k, case.v
    if anchors:
        covered = min(case.length, max(a.length for a in anchors))
        used = [a for a in anchors if a.length >= covered]
        weights_k = token_weights(case.k[:, :, :covered], [a.base_k for a in used])
        weights_v = token_weights(case.v[:, :, :covered], [a.base_v for a in used])
        out_k = add_weighted(case.k, weights_k, [a.delta_k for a in used])
        out_v = add_weighted(case.v, weights_v, [a.delta_v for a in used])
    return Outcome(dense, entropy, counts, out_k, out_v)


def make_case(
    name: str,
    seed: int,
    length: int,
    lengths: Sequence[int],
    *,
    threshold: float = 0.4,
    spread: float = 1.0,
    near: float | None = None,
    layers: int = 3,
    heads: int = 2,
    dim: int = 4,
) -> Case:
    """Random tensors.

    Args:
        spread: size of the differences between bases; small ones make flat scores.
        near: make the first anchor's base the cache itself plus this much noise.
    """
    rng = np.random.default_rng(seed)
    longest = max([length, *lengths])
    common = rng.normal(size=(2, layers, heads, longest, dim))

    def base() -> Array:
        return common + spread * rng.normal(size=common.shape)

    own, anchors = base(), []
    for i, n in enumerate(lengths):
        k, v = base() if near is None or i else own + near * rng.normal(size=common.shape)
        delta_k, delta_v = rng.normal(size=common.shape)
        anchors.append(RefAnchor(*(x[:, :, :n].copy() for x in (k, v, delta_k, delta_v))))
    return Case(name, own[0][:, :, :length], own[1][:, :, :length], tuple(anchors), threshold)


CASES = (
    make_case("equal lengths", 1, 6, [6, 6, 6]),
    make_case("longer anchors", 2, 5, [7, 5, 11]),
    make_case("one is too short", 3, 8, [5, 9, 8, 12], threshold=0.9),
    make_case("only one is long enough", 4, 9, [4, 9, 6]),
    make_case("none is long enough", 5, 12, [4, 9, 6]),
    make_case("two anchors", 6, 4, [4, 4], threshold=0.8),
    make_case("one anchor", 7, 4, [6]),
    make_case("no anchor", 8, 4, []),
    make_case("one token", 9, 1, [1, 2, 3], threshold=0.95),
    make_case("flat scores", 10, 10, [10, 10, 10], spread=0.01, threshold=0.9),
    make_case("flat scores, everything accepted", 11, 10, [10, 12, 10], spread=0.01, threshold=1),
    make_case("its own anchor", 12, 7, [7, 7, 9], near=0.0),
    make_case("nearly its own anchor", 13, 7, [7, 7, 9], near=0.01, threshold=0.1),
    make_case("more tokens than features", 14, 20, [20, 24, 20, 31], threshold=0.9),
    make_case("several scores count", 15, 6, [6] * 8, spread=0.3, threshold=0.9),
)
