"""Truncated factors of tall matrices, and what can be computed from them without reconstruction.

Matrices are a segment's keys or values, one per layer: ``[layers, tokens, D]`` with D = kv_heads *
head_dim (paper section 3.3, Eq. 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Factorisation = Literal["exact", "randomised"]

# Tokens handled at once, those of all stacked factors together: keeps temporaries below the K and V
# of one layer of a long segment, and in a CPU's cache.
BLOCK = 2560


@dataclass(frozen=True)
class Factors:
    """``Z ~ a @ b`` per layer: ``a [layers, tokens, rank]``, ``b [layers, rank, D]``.

    The rows of ``b`` are orthonormal up to rounding to its dtype.
    """

    a: Tensor
    b: Tensor

    def __len__(self) -> int:
        return self.a.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.a.nbytes + self.b.nbytes

    def matrix(self, layer: int) -> Tensor:
        """The reconstruction of one layer, ``[tokens, D]``, fp32."""
        return self.a[layer].float() @ self.b[layer].float()


@dataclass(frozen=True)
class FactorPair:
    """Factors of a segment's keys and of its values."""

    k: Factors
    v: Factors

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.k.nbytes + self.v.nbytes

    def tensors(self) -> dict[str, Tensor]:
        """Named tensors, for checkpoints."""
        return {"k.a": self.k.a, "k.b": self.k.b, "v.a": self.v.a, "v.b": self.v.b}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> FactorPair:
        """Inverse of :meth:`tensors`."""
        return cls(Factors(tensors["k.a"], tensors["k.b"]), Factors(tensors["v.a"], tensors["v.b"]))


def by_token(kv: Tensor) -> Tensor:
    """``[..., kv_heads, tokens, head_dim]`` as ``[..., tokens, kv_heads, head_dim]``, a view."""
    return kv.transpose(-3, -2)


def flat(kv: Tensor) -> Tensor:
    """``[..., kv_heads, tokens, head_dim]`` as matrices ``[..., tokens, kv_heads * head_dim]``."""
    return by_token(kv).flatten(-2)


def factorise(
    z: Tensor,
    rank: int | None,
    method: Factorisation = "exact",
    generator: torch.Generator | None = None,
    *,
    minus: Tensor | None = None,
) -> Factors:
    """Best rank-``rank`` factors (None: full) of every layer of ``z``, stored in z's dtype.

    ``z [layers, tokens, D]``, where D may be spread over several axes; with ``minus`` of the same
    shape it is their difference. Layers come one after another, so that no array but the factors
    is larger than one of them.

    The effective rank is min(rank, tokens, D). ``exact`` takes the leading eigenvectors of the
    smaller Gram matrix, which is the truncated SVD up to rounding and costs one pass over a tall
    matrix; ``randomised`` is a range finder with two power iterations drawing from ``generator``.
    """
    layers, tokens, *axes = z.shape
    width = math.prod(axes)
    rank = min(tokens, width, rank if rank is not None else width)
    a, b = z.new_empty(layers, tokens, rank), z.new_empty(layers, rank, width)
    for layer in range(layers):
        a[layer], b[layer] = _truncated(_matrix(z, minus, layer), rank, method, generator)
    return Factors(a, b)


def _matrix(z: Tensor, minus: Tensor | None, layer: int) -> Tensor:
    rows = z[layer] if minus is None else z[layer] - minus[layer]
    return rows.flatten(1).float()


def _truncated(
    x: Tensor, rank: int, method: Factorisation, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Factors ``[tokens, rank]`` and ``[rank, D]`` of ``x [tokens, D]``, fp32."""
    right = _right_factor(x, rank, method, generator)
    return x @ right, right.T


def _right_factor(
    x: Tensor, rank: int, method: Factorisation, generator: torch.Generator | None
) -> Tensor:
    """Orthonormal columns ``[D, rank]`` that span what ``x [tokens, D]`` mostly lies in."""
    if method == "randomised":
        return _range_finder(x, rank, generator)
    if x.shape[0] < x.shape[1]:
        # Rows of x span at most `tokens` directions: factor inside that span to stay orthonormal.
        basis = torch.linalg.qr(x.T).Q
        return basis @ _leading(x @ basis, rank)
    return _leading(x, rank)


def _leading(x: Tensor, rank: int) -> Tensor:
    """Leading right singular vectors ``[D, rank]`` by the Gram matrix."""
    vectors = torch.linalg.eigh((x.T @ x).double()).eigenvectors
    return vectors[:, -rank:].flip(-1).float()


def _range_finder(x: Tensor, rank: int, generator: torch.Generator | None) -> Tensor:
    probe = torch.randn(x.shape[0], rank, generator=generator, dtype=torch.float32)
    basis = torch.linalg.qr(x.T @ probe.to(x.device)).Q
    for _ in range(2):
        basis = torch.linalg.qr(x.T @ torch.linalg.qr(x @ basis).Q).Q
    return basis


def prefix_distances(v: Tensor, bases: Sequence[Factors], rows: int) -> Tensor:
    """Frobenius distances of ``v [layers, kv_heads, tokens, head_dim]`` to each base (Eq. 9).

    Over the first ``rows`` tokens and all layers, without reconstructing:
    ``|X|^2 - 2 <X B^T, A> + <A, A (B B^T)>``, accumulated in fp64. The last term keeps B B^T
    because B may be rounded to bf16. Returns ``[bases]``, fp64.
    """
    total = torch.zeros(len(bases), dtype=torch.float64, device=v.device)
    for layer in range(v.shape[0] if bases else 0):
        b = _stack_b(bases, layer)
        gram, columns = b @ b.mT, b.flatten(0, 1).T
        for part in _blocks(rows, len(bases)):
            x = flat(v[layer, :, part]).float()
            a = _stack_a(bases, layer, part)
            projected = (x @ columns).unflatten(1, b.shape[:2]).transpose(0, 1)
            cross = torch.bmm(a, gram).sub_(projected, alpha=2).mul_(a)
            total += cross.sum(dim=(1, 2), dtype=torch.float64)
            total += x.square().sum(dtype=torch.float64)
    return total.clamp_min(0).sqrt()


def token_distances(kv: Tensor, bases: Sequence[Factors], rows: int) -> Tensor:
    """Mean absolute distance per token to each reconstructed base, over layers, heads and dims.

    ``kv [layers, kv_heads, tokens, head_dim]``; a base shorter than ``rows`` is infinitely far
    from the tokens it does not reach. Returns ``[bases, rows]``, fp32.
    """
    layers, heads, _, dim = kv.shape
    total = torch.zeros(len(bases), rows, device=kv.device)
    for layer in range(layers if bases else 0):
        b = _stack_b(bases, layer)
        for part in _blocks(rows, len(bases)):
            x = flat(kv[layer, :, part]).float().expand(len(bases), -1, -1)
            difference = torch.baddbmm(x, _stack_a(bases, layer, part), b, alpha=-1)
            total[:, part] += difference.abs_().sum(dim=-1)
    total /= layers * heads * dim
    for i, base in enumerate(bases):
        total[i, len(base) :] = torch.inf
    return total


def weighted_sum(
    weights: Tensor, deltas: Sequence[Factors], layer: int
) -> Iterator[tuple[slice, Tensor]]:
    """``sum_v w_v A_v B_v`` of one layer (Eq. 8), by blocks of tokens: ``[tokens, D]``, fp32.

    ``weights [deltas, tokens]``; a delta that does not reach a token counts as zero there.
    """
    b = _stack_b(deltas, layer).flatten(0, 1)
    for part in _blocks(weights.shape[1], len(deltas)):
        a = _stack_a(deltas, layer, part) * weights[:, part, None]
        yield part, a.transpose(0, 1).flatten(1) @ b


def _blocks(rows: int, stacked: int) -> Iterator[slice]:
    step = max(1, BLOCK // stacked)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _stack_a(factors: Sequence[Factors], layer: int, part: slice) -> Tensor:
    """Left factors of the tokens ``part``, ``[factors, tokens, rank]`` fp32, zero where missing."""
    rank = max(f.a.shape[2] for f in factors)
    shape = (part.stop - part.start, rank)
    return torch.stack([_padded(f.a[layer, part].float(), shape) for f in factors])


def _stack_b(factors: Sequence[Factors], layer: int) -> Tensor:
    """Right factors, ``[factors, rank, D]`` fp32, zero rows beyond a factor's own rank."""
    shape = (max(f.b.shape[1] for f in factors), factors[0].b.shape[2])
    return torch.stack([_padded(f.b[layer].float(), shape) for f in factors])


def _padded(x: Tensor, shape: tuple[int, int]) -> Tensor:
    if x.shape == shape:
        return x
    return F.pad(x, (0, shape[1] - x.shape[1], 0, shape[0] - x.shape[0]))
