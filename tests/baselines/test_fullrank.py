"""Full-rank pairs: what they say they hold is what they hold."""

from __future__ import annotations

import torch

from baselines.fullrank import Pair
from kvcmas.engine.cache import SegmentCache


def test_a_delta_holds_nothing_of_layer_0() -> None:
    source, target = (
        SegmentCache(torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 8)) for _ in range(2)
    )
    delta = Pair.delta(target, source)
    assert torch.equal(delta.k, target.k[1:] - source.k[1:])
    assert torch.equal(delta.v, target.v[1:] - source.v[1:])
    held = sum(t.untyped_storage().nbytes() for t in delta.tensors().values())
    assert held == delta.nbytes
