"""The probe finds rows wherever a backend puts them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcmas.errors import UserError
from kvcmas.serving.layout import PagedRows, Placement

BLOCKS, HEADS, BLOCK, DIM = 5, 2, 8, 4
Write = Callable[[Tensor, int, int, Tensor, Tensor], None]


def rows_after_rows(cache: Tensor, block: int, at: int, k: Tensor, v: Tensor) -> None:
    """CUDA backends: the logical view holds K and V side by side."""
    cache[block, :, at, :DIM], cache[block, :, at, DIM:] = k, v


def keys_transposed(cache: Tensor, block: int, at: int, k: Tensor, v: Tensor) -> None:
    """The CPU backend: keys first, dim by dim, then values row by row."""
    flat = cache[block].view(HEADS, -1)
    flat[:, : BLOCK * DIM].view(HEADS, DIM, BLOCK)[:, :, at] = k
    flat[:, BLOCK * DIM :].view(HEADS, BLOCK, DIM)[:, at] = v


def pairs_interleaved(cache: Tensor, block: int, at: int, k: Tensor, v: Tensor) -> None:
    """Nothing linear: two rows share a run of dims, as matrix tiles want them."""
    flat = cache[block].view(HEADS, -1)
    packed = flat[:, : BLOCK * DIM].view(HEADS, BLOCK // 2, DIM, 2)
    packed[:, at // 2, :, at % 2] = k
    flat[:, BLOCK * DIM :].view(HEADS, BLOCK, DIM)[:, at] = v


def attention(write: Write, dtype: torch.dtype, *, head_last: bool = False) -> Any:
    """A stand-in for vLLM's attention layer with a cache of ``BLOCKS`` blocks."""

    def update(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            write(cache, slot // BLOCK, slot % BLOCK, key[row], value[row])

    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=dtype)
    if head_last:  # the same logical view on another order in memory
        cache = torch.zeros(BLOCKS, BLOCK, HEADS, 2 * DIM, dtype=dtype).transpose(1, 2)
    return SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=update))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("write", "head_last"),
    [
        (rows_after_rows, False),
        (rows_after_rows, True),
        (keys_transposed, False),
        (pairs_interleaved, False),
    ],
)
def test_what_was_written_is_read(write: Write, head_last: bool, dtype: torch.dtype) -> None:
    layer = attention(write, dtype, head_last=head_last)
    k, v = (torch.randn(BLOCKS * BLOCK, HEADS, DIM).to(dtype) for _ in range(2))
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, torch.arange(BLOCKS * BLOCK))
    placement = Placement.probe(layer)
    for offsets, rows in ((placement.k, k), (placement.v, v)):
        paged = PagedRows(layer.kv_cache, offsets)
        slots = torch.tensor([17, 3, 39, 16])
        got = paged.scattered(slots // BLOCK, slots % BLOCK)
        assert torch.equal(got, rows[slots].transpose(0, 1))
        blocks = torch.tensor([4, 0, 2])
        expected = rows.view(BLOCKS, BLOCK, HEADS, DIM)[blocks].flatten(0, 1)
        assert torch.equal(paged.whole(blocks), expected.transpose(0, 1))


def test_a_cache_that_loses_rows_is_refused() -> None:
    def lossy(cache: Tensor, block: int, at: int, k: Tensor, v: Tensor) -> None:
        rows_after_rows(cache, block, at // 2, k, v)

    with pytest.raises(UserError, match="does not hold plain rows"):
        Placement.probe(attention(lossy, torch.float32))
