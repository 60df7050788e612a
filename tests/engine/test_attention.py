from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcmas.engine.attention import CHUNK, MAX_RUNS, Rows, attend

HEADS, KV_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows_of(positions: list[int]) -> Rows:
    return Rows(torch.tensor(positions, dtype=torch.long), CPU)


def plain(q: Tensor, positions: list[int], k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention in fp64, one query at a time over the keys it may see."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty_like(q)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for i, position in enumerate(positions):
            scores = k[group, : position + 1] @ q[head, i] / DIM**0.5
            out[head, i] = scores.softmax(0) @ v[group, : position + 1]
    return out


def check(positions: list[int], capacity: int) -> None:
    q = random(HEADS, len(positions), DIM)
    k, v = random(KV_HEADS, capacity, DIM, seed=1), random(KV_HEADS, capacity, DIM, seed=2)
    # Unfilled rows of a buffer hold anything.
    k[:, positions[-1] + 1 :], v[:, positions[-1] + 1 :] = torch.nan, torch.nan
    got = attend(q, rows_of(positions), k, v)
    assert got.shape == q.shape
    torch.testing.assert_close(got.double(), plain(q, positions, k, v), atol=2e-6, rtol=0)


@st.composite
def row_sets(draw: st.DrawFn, longest: int = 12) -> list[int]:
    """Runs of any length with gaps between them."""
    positions = list[int]()
    at = draw(st.integers(0, 5))
    for length, gap in draw(
        st.lists(st.tuples(st.integers(1, longest), st.integers(1, 5)), min_size=1, max_size=24)
    ):
        positions += range(at, at + length)
        at += length + gap
    return positions


@settings(deadline=None, max_examples=60)
@given(row_sets(), st.integers(0, 9))
def test_any_row_set_equals_plain_softmax(positions: list[int], spare: int) -> None:
    check(positions, positions[-1] + 1 + spare)


@pytest.mark.parametrize(
    "positions",
    [
        [0],
        [7],
        list(range(40)),
        list(range(3, 40)),
        [*range(9), 12, *range(20, 31)],
        list(range(0, 2 * MAX_RUNS, 2)),
        list(range(0, 2 * MAX_RUNS + 2, 2)),
        list(range(1, 101, 3)),
    ],
    ids=lambda positions: f"{len(positions)} to {positions[-1]}",
)
def test_every_path_equals_plain_softmax(positions: list[int]) -> None:
    check(positions, positions[-1] + 3)


@pytest.mark.parametrize(
    "positions",
    [
        list(range(CHUNK + 60)),
        list(range(5, CHUNK + 65)),
        list(range(0, 2 * CHUNK + 120, 2)),
        [*range(30), *range(40, CHUNK + 70), CHUNK + 90],
    ],
    ids=["prefix", "run", "scattered", "mixed"],
)
def test_more_rows_than_a_chunk(positions: list[int]) -> None:
    assert len(positions) > CHUNK
    check(positions, positions[-1] + 1)


@settings(deadline=None, max_examples=40)
@given(row_sets(longest=6), st.data())
def test_a_query_does_not_depend_on_the_other_rows(
    positions: list[int], data: st.DataObject
) -> None:
    """Contiguous, scattered and masked calls agree, whatever the row's company."""
    n = positions[-1] + 1
    q = random(HEADS, n, DIM)
    k, v = random(KV_HEADS, n, DIM, seed=1), random(KV_HEADS, n, DIM, seed=2)
    everything = attend(q, rows_of(list(range(n))), k, v)
    together = attend(q[:, positions], rows_of(positions), k, v)
    torch.testing.assert_close(together, everything[:, positions], atol=2e-6, rtol=0)
    one = data.draw(st.sampled_from(positions))
    alone = attend(q[:, [one]], rows_of([one]), k, v)
    torch.testing.assert_close(alone, everything[:, [one]], atol=2e-6, rtol=0)


@settings(deadline=None, max_examples=40)
@given(row_sets(longest=6), st.data())
def test_no_query_sees_a_later_key(positions: list[int], data: st.DataObject) -> None:
    """The mask is key <= query, not bottom-right aligned (CacheBlend #21, LMCache #1152)."""
    n = positions[-1] + 1
    q, rows = random(HEADS, len(positions), DIM), rows_of(positions)
    k, v = random(KV_HEADS, n, DIM, seed=1), random(KV_HEADS, n, DIM, seed=2)
    before = attend(q, rows, k, v)
    changed = data.draw(st.integers(0, n - 1))
    k[:, changed] += 3.0
    v[:, changed] += 50.0
    after = attend(q, rows, k, v)
    for i, position in enumerate(positions):
        if position < changed:
            assert torch.equal(after[:, i], before[:, i])
        else:
            assert not torch.allclose(after[:, i], before[:, i], atol=1e-6)


def test_one_kv_head_per_head_and_one_for_all() -> None:
    n = 9
    for groups in (1, HEADS):
        q, kv = random(HEADS, n, DIM), random(2, groups, n, DIM, seed=1)
        full = kv.repeat_interleave(HEADS // groups, dim=1)
        scores = (q @ full[0].mT / DIM**0.5).masked_fill(
            torch.ones(n, n).triu(1).bool(), -torch.inf
        )
        expected = scores.softmax(-1) @ full[1]
        got = attend(q, rows_of(list(range(n))), *kv)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)


@given(row_sets())
def test_runs_cover_the_set_and_nothing_else(positions: list[int]) -> None:
    rows = rows_of(positions)
    assert [row for low, high in rows.runs for row in range(low, high)] == positions
    assert all(high < low for (_, high), (low, _) in pairwise(rows.runs))
    assert rows.attended == sum(position + 1 for position in positions)
    assert len(rows) == len(positions)


def test_an_empty_set_has_no_runs() -> None:
    rows = rows_of([])
    assert (rows.runs, rows.attended, len(rows)) == ([], 0, 0)


@given(row_sets())
def test_scatter_writes_its_rows_only(positions: list[int]) -> None:
    n = positions[-1] + 4
    buffer, fresh = random(KV_HEADS, n, DIM), random(KV_HEADS, len(positions), DIM, seed=1)
    expected = buffer.clone()
    for i, position in enumerate(positions):
        expected[:, position] = fresh[:, i]
    rows_of(positions).scatter_(buffer, fresh)
    assert torch.equal(buffer, expected)
