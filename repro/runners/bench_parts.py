"""What benches share: rounds, and random ids, caches and anchors.

What a correction costs depends on shapes alone, so caches and anchors are drawn, not computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.engine.adapter import ModelSpec
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Edge, Held
from kvcmas.engine.segments import Prompt
from kvcmas.method.kvcmas import KVCMAS
from kvcmas.pool.anchors import edge_key
from kvcmas.pool.lowrank import FactorPair, Factors

# Layout L0 (DESIGN section 7): agent-specific tokens before and after the shared span.
BEFORE, AFTER = 64, 16

Step = Callable[[str], None]


@dataclass(frozen=True)
class Clock:
    """Seconds, after all queued work of ``device``."""

    device: torch.device

    def now(self) -> float:
        """The time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def time(self, work: Callable[[], object]) -> float:
        """Seconds that ``work`` takes."""
        start = self.now()
        work()
        return self.now() - start


def interleaved(
    parts: Mapping[str, Callable[[], float]], repeats: int, on_step: Step
) -> dict[str, tuple[float, ...]]:
    """Seconds of every part, once per round; parts time themselves.

    The first round is a warm-up and discarded. The order alternates, so that drift cancels.
    """
    names = list(parts)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(repeats + 1):
        for name in names if i % 2 else names[::-1]:
            on_step(f"round {i} of {repeats}: {name}" if i else f"warm-up: {name}")
            taken = parts[name]()
            if i:
                seconds[name].append(taken)
    return {name: tuple(values) for name, values in seconds.items()}


@dataclass(frozen=True)
class KVShape:
    """Shape of K and of V; ``width`` is the D of the paper's factors."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, spec: ModelSpec) -> KVShape:
        """That of a model."""
        return cls(spec.layers, spec.kv_heads, spec.head_dim, spec.dtype, spec.device)

    @property
    def width(self) -> int:
        """kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    def layer_bytes(self, tokens: int) -> int:
        """K and V of one layer."""
        return 2 * tokens * self.width * self.dtype.itemsize


class Draw:
    """Seeded random token ids, caches and anchors."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def ids(self, vocab: int, tokens: int) -> tuple[int, ...]:
        """Token ids below ``vocab``."""
        return tuple(torch.randint(vocab, (tokens,), generator=self._generator).tolist())

    def cache(self, shape: KVShape, tokens: int) -> SegmentCache:
        """A segment's K and V."""
        size = (shape.layers, shape.kv_heads, tokens, shape.head_dim)
        return SegmentCache(self._normal(shape, *size), self._normal(shape, *size))

    def anchors(
        self, method: KVCMAS, shape: KVShape, edges: Mapping[Edge, int], anchors: int
    ) -> None:
        """Fill the pools of ``edges`` (tokens of their segments) with ``anchors`` each."""
        for n in range(anchors):
            for edge, tokens in edges.items():
                key = edge_key(edge)
                parts = {
                    key: self._factors(shape, shape.layers - 1, tokens, method.rank_delta),
                    method.base_key(key): self._factors(
                        shape, shape.layers, tokens, method.rank_base
                    ),
                }
                method.pool.insert(edge.slot, f"anchor-{n}", tokens, parts, exact=True)

    def sources(self, shape: KVShape, prompt: Prompt, holders: Mapping[int, str]) -> RandomSources:
        """A cache for every PH of ``prompt``, left by the node that ``holders`` names."""
        return RandomSources(
            {
                i: Held(self.cache(shape, len(prompt.segments[i])), node, exact=True)
                for i, node in holders.items()
            }
        )

    def _factors(self, shape: KVShape, layers: int, tokens: int, rank: int | None) -> FactorPair:
        rank = min(rank or shape.width, tokens, shape.width)
        k, v = (
            Factors(
                self._normal(shape, layers, tokens, rank),
                torch.linalg.qr(self._normal(shape, layers, shape.width, rank).float())
                .Q.mT.contiguous()
                .to(shape.dtype),
            )
            for _ in range(2)
        )
        return FactorPair(k, v)

    def _normal(self, shape: KVShape, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(shape.device, shape.dtype)


@dataclass(frozen=True)
class RandomSources:
    """Sources of one prompt that hold random caches."""

    by_segment: Mapping[int, Held]

    def held(self, segment: int) -> Held | None:
        """See :class:`~kvcmas.engine.contract.Sources`."""
        return self.by_segment.get(segment)

    def reference(self, segment: int) -> SegmentCache:
        """See :class:`~kvcmas.engine.contract.Sources`.

        Raises:
            ValueError: always; chained methods need no reference.
        """
        raise ValueError(f"segment {segment} has no context-free reference here")


def exponents(sizes: Sequence[int], seconds: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Per round, the exponent p of ``seconds ~ size ** p``, fitted by least squares in logs."""
    x = torch.tensor(sizes, dtype=torch.float64).log()
    x -= x.mean()
    y = torch.tensor(seconds, dtype=torch.float64).log()  # [sizes, rounds]
    return tuple(((x[:, None] * y).sum(0) / x.square().sum()).tolist())
