"""How deltas are weighted and added: the paper's way and our variants, against plain formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Correction
from kvcmas.method import correction
from kvcmas.method.correction import Weights, interpolate, match_tokens
from kvcmas.pool.lowrank import FactorPair, factorise, flat

LAYERS, HEADS, DIM = 3, 2, 4
D = HEADS * DIM


def random(tokens: int, seed: int, layers: int = LAYERS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(layers, HEADS, tokens, DIM, generator=generator)


@dataclass(frozen=True)
class Anchors:
    """Full tensors and their full-rank factors."""

    bases: list[SegmentCache]
    deltas: list[SegmentCache]

    @classmethod
    def make(cls, *lengths: int, seed: int = 100) -> Anchors:
        bases, deltas = [], []
        for i, n in enumerate(lengths):
            at = seed + 10 * i
            bases.append(SegmentCache(random(n, at), random(n, at + 1)))
            deltas.append(
                SegmentCache(random(n, at + 2, LAYERS - 1), random(n, at + 3, LAYERS - 1))
            )
        return cls(bases, deltas)

    @property
    def base_factors(self) -> list[FactorPair]:
        return [factors(base) for base in self.bases]

    @property
    def delta_factors(self) -> list[FactorPair]:
        return [factors(delta) for delta in self.deltas]


def factors(cache: SegmentCache) -> FactorPair:
    return FactorPair(factorise(flat(cache.k), None), factorise(flat(cache.v), None))


def added(correction: Correction, tokens: int) -> tuple[Tensor, Tensor]:
    """What a correction adds in the layers from 1, rows it does not cover left at 0."""
    k, v = torch.zeros(2, LAYERS - 1, HEADS, tokens, DIM)
    for layer in range(1, LAYERS):
        rows = correction.rows
        correction.apply(layer, k[layer - 1, :, :rows], v[layer - 1, :, :rows])
    return k, v


@pytest.fixture
def cache() -> SegmentCache:
    return SegmentCache(random(9, 1), random(9, 2))


def by_position(
    cache: SegmentCache,
    anchors: Anchors,
    rows: int,
    weights: Weights = "distance",
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    result = interpolate(
        cache, anchors.base_factors, anchors.delta_factors, rows, (), weights, temperature
    )
    return added(result, len(cache))


def test_uniform_is_the_mean_delta(cache: SegmentCache) -> None:
    anchors = Anchors.make(9, 12, 9)
    k, v = by_position(cache, anchors, 9, "uniform")
    expected = torch.stack([delta.k[:, :, :9] for delta in anchors.deltas]).mean(dim=0)
    torch.testing.assert_close(k, expected, atol=1e-5, rtol=0)
    expected = torch.stack([delta.v[:, :, :9] for delta in anchors.deltas]).mean(dim=0)
    torch.testing.assert_close(v, expected, atol=1e-5, rtol=0)


def test_uniform_per_token_is_the_mean_of_the_anchors_that_reach_it(cache: SegmentCache) -> None:
    anchors = Anchors.make(9, 4)
    k, _ = by_position(cache, anchors, 9, "uniform")
    first, second = (delta.k for delta in anchors.deltas)
    torch.testing.assert_close(
        k[:, :, :4],
        (first + torch.nn.functional.pad(second, (0, 0, 0, 5)))[:, :, :4] / 2,
        atol=1e-5,
        rtol=0,
    )
    torch.testing.assert_close(k[:, :, 4:], first[:, :, 4:], atol=1e-5, rtol=0)


def test_nearest_anchor_takes_one_delta_for_keys_and_values(cache: SegmentCache) -> None:
    """Nearest by values over the covered rows; what lies behind them plays no part."""
    anchors = Anchors.make(12, 9, 9)
    near = anchors.bases[0]
    near.v[:, :, :9] = cache.v + 0.1
    near.v[:, :, 9:] = 1e3
    k, v = by_position(cache, anchors, 9, "nearest_anchor")
    torch.testing.assert_close(k, anchors.deltas[0].k[:, :, :9], atol=1e-5, rtol=0)
    torch.testing.assert_close(v, anchors.deltas[0].v[:, :, :9], atol=1e-5, rtol=0)


def test_distance_weighs_keys_and_values_apart(cache: SegmentCache) -> None:
    anchors = Anchors.make(9, 9)
    anchors.bases[0].k.copy_(cache.k)
    anchors.bases[1].v.copy_(cache.v)
    k, v = by_position(cache, anchors, 9, temperature=0.01)
    torch.testing.assert_close(k, anchors.deltas[0].k, atol=1e-4, rtol=0)
    torch.testing.assert_close(v, anchors.deltas[1].v, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_weight_temperature(cache: SegmentCache, temperature: float) -> None:
    anchors = Anchors.make(9, 9)
    distances = torch.stack([(cache.v - b.v).abs().mean(dim=(0, 1, 3)) for b in anchors.bases])
    weights = torch.softmax(-distances / temperature, dim=0)
    expected = sum(w[:, None] * d.v for w, d in zip(weights, anchors.deltas, strict=True))
    _, v = by_position(cache, anchors, 9, temperature=temperature)
    torch.testing.assert_close(v, expected, atol=1e-5, rtol=0)


def by_content(
    cache: SegmentCache, anchors: Anchors, neighbours: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    result = match_tokens(
        cache, anchors.base_factors, anchors.delta_factors, (), neighbours, temperature
    )
    assert result.rows == len(cache)
    return added(result, len(cache))


def test_content_is_found_wherever_it_stands() -> None:
    """A segment shuffled and spread over two anchors gets back exactly the deltas of its tokens."""
    anchors = Anchors.make(7, 5)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))

    def joined(parts: list[SegmentCache]) -> SegmentCache:
        k, v = (torch.cat([getattr(p, x) for p in parts], dim=2)[:, :, order] for x in "kv")
        return SegmentCache(k, v)

    k, v = by_content(joined(anchors.bases), anchors, neighbours=1)
    expected = joined(anchors.deltas)
    torch.testing.assert_close(k, expected.k, atol=1e-5, rtol=0)
    torch.testing.assert_close(v, expected.v, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("neighbours", "temperature"), [(1, 1.0), (3, 0.2), (3, 1.0), (99, 1.0)])
def test_token_knn_is_the_weighted_delta_of_the_nearest_tokens(
    cache: SegmentCache, neighbours: int, temperature: float
) -> None:
    anchors = Anchors.make(6, 11)
    k, v = by_content(cache, anchors, neighbours, temperature)
    for got, which in ((k, "k"), (v, "v")):
        bases = torch.cat([getattr(b, which) for b in anchors.bases], dim=2)
        deltas = torch.cat([getattr(d, which) for d in anchors.deltas], dim=2)
        for token in range(len(cache)):
            row = getattr(cache, which)[:, :, token, None]
            distance = (bases - row).square().mean(dim=(0, 1, 3)).sqrt()
            nearest = distance.argsort()[:neighbours]
            weights = torch.softmax(-distance[nearest] / temperature, dim=0)
            expected = (deltas[:, :, nearest] * weights[:, None]).sum(dim=2)
            torch.testing.assert_close(got[:, :, token], expected, atol=1e-4, rtol=0)


def test_token_knn_works_on_long_segments_and_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correction, "MATCHED", 64_000)
    anchors = Anchors.make(600, 40)
    base = anchors.bases[0]
    k, v = by_content(SegmentCache(base.k.flip(2), base.v.flip(2)), anchors, neighbours=1)
    torch.testing.assert_close(v, anchors.deltas[0].v.flip(2), atol=1e-4, rtol=0)
    low = replace(
        anchors, bases=[SegmentCache(b.k.bfloat16(), b.v.bfloat16()) for b in anchors.bases]
    )
    cache = SegmentCache(low.bases[0].k, low.bases[0].v)
    low_k, _ = by_content(cache, low, neighbours=1)
    torch.testing.assert_close(low_k, anchors.deltas[0].k, atol=1e-4, rtol=0)
    assert k.isfinite().all()
