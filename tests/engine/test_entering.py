"""Rows that enter late: which ones may, with what, and what later turns find."""

from __future__ import annotations

import pytest
import torch

from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import (
    Candidates,
    Enter,
    Event,
    Fill,
    Plan,
    Select,
    filled_rows,
    unfilled_rows,
)
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from tests.workflows import random_ids

PROMPT = Prompt((pf(random_ids(1, 6)), ph("q", random_ids(2, 8)), ph("obs0", (4, 5))))


@pytest.fixture
def fills(executor: Executor) -> tuple[Fill, ...]:
    source = Prompt((pf(random_ids(3, 5)), *PROMPT.segments[1:]))
    run = executor.run(source, Plan.make(source), hidden_layers=(2,))
    return tuple(Fill(i, run.buffer.extract(source.rows(i))) for i in (1, 2))


def test_filled_and_unfilled_rows_are_a_partition(fills: tuple[Fill, ...]) -> None:
    assert filled_rows(PROMPT, fills).tolist() == list(range(6, 15))
    assert unfilled_rows(PROMPT, fills).tolist() == [*range(6), 15]
    assert filled_rows(PROMPT, fills[:1]).tolist() == list(range(6, 14))
    assert filled_rows(PROMPT, ()).tolist() == []


@pytest.mark.parametrize("row", [0, 15])
def test_no_row_enters_twice(row: int, executor: Executor, fills: tuple[Fill, ...]) -> None:
    rows = torch.tensor(sorted({row, 7}))
    plan = Plan.make(PROMPT, fills, extra=(Enter(2, rows, torch.zeros(2, 256)),))
    with pytest.raises(ValueError, match="active already"):
        executor.run(PROMPT, plan)


def test_every_row_enters_with_its_residual(executor: Executor, fills: tuple[Fill, ...]) -> None:
    plan = Plan.make(PROMPT, fills, extra=(Enter(2, torch.tensor([6, 7]), torch.zeros(3, 256)),))
    with pytest.raises(ValueError, match="2 rows enter with 3 residual rows"):
        executor.run(PROMPT, plan)


def test_a_source_without_residual_rows_cannot_pass_them_on(
    executor: Executor, fills: tuple[Fill, ...]
) -> None:
    bare = SegmentCache(fills[0].cache.k, fills[0].cache.v)
    with pytest.raises(ValueError, match=r"layer 2 were captured \(layers: none\)"):
        executor.run(PROMPT, Plan.make(PROMPT, (Fill(1, bare), fills[1])), hidden_layers=(2,))
    with pytest.raises(ValueError, match=r"layer 3 were captured \(layers: 2\)"):
        executor.run(PROMPT, Plan.make(PROMPT, fills), hidden_layers=(3,))


def test_selections_see_only_rows_that_are_left(
    executor: Executor, fills: tuple[Fill, ...]
) -> None:
    rows, seen = filled_rows(PROMPT, fills), []

    def drop_first(candidates: Candidates) -> torch.Tensor:
        seen.append(candidates.rows.tolist())
        assert candidates.k_new.shape[1] == candidates.v_old.shape[1] == len(candidates.rows)
        return candidates.rows[1:]

    extra: tuple[Event, ...] = (
        Enter(0, rows, write=False),
        *(Select(layer, rows, drop_first) for layer in (1, 2, 3)),
    )
    executor.run(PROMPT, Plan.make(PROMPT, fills, extra=extra))
    assert seen == [list(range(first, 15)) for first in (6, 7, 8)]
