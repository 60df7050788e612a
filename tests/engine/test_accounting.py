from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kvcmas.engine.accounting import Entries, account, count
from kvcmas.engine.cache import Origin
from kvcmas.engine.contract import Enter, Fill, Leave, Plan, Select
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from tests.workflows import random_ids

LAYERS = 4  # of both tiny models
PROMPT = Prompt(
    (
        pf(random_ids(1, 6)),
        ph("q", random_ids(2, 8)),
        ph("nothing", ()),
        pf(random_ids(3, 3)),
        ph("out0", random_ids(4, 5)),
        pf(random_ids(5, 2)),
    )
)
Q, OUT = 1, 4
WRITTEN = st.sampled_from([origin for origin in Origin if origin != Origin.UNSET])


@given(st.lists(st.lists(WRITTEN, min_size=5, max_size=5), min_size=1, max_size=6))
def test_every_entry_is_counted_once_by_its_origin(rows: list[list[Origin]]) -> None:
    entries = count(torch.tensor(rows, dtype=torch.uint8))
    flat = [origin for row in rows for origin in row]
    assert entries == Entries(
        reused=flat.count(Origin.REUSED),
        corrected=flat.count(Origin.CORRECTED),
        executed=flat.count(Origin.EXECUTED),
        prefix_hit=flat.count(Origin.PREFIX_HIT),
    )
    assert entries.total == 5 * len(rows)


def test_an_entry_that_nobody_wrote_is_an_error() -> None:
    origin = torch.full((2, 3), int(Origin.EXECUTED), dtype=torch.uint8)
    origin[1, 2] = Origin.UNSET
    with pytest.raises(ValueError, match=r"1 \(layer, row\) entries were never written"):
        count(origin)


@given(st.data())
def test_accounting_equals_a_brute_force_count(data: st.DataObject) -> None:
    size = LAYERS * len(PROMPT)
    flat = data.draw(st.lists(WRITTEN, min_size=size, max_size=size))
    origin = torch.tensor(flat, dtype=torch.uint8).view(LAYERS, len(PROMPT))
    touched = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(PROMPT), max_size=len(PROMPT)))
    )
    got = account(PROMPT, origin, touched, row_layers=17, flops=23)
    assert (got.layers, got.prompt_tokens, got.row_layers, got.flops) == (4, len(PROMPT), 17, 23)
    assert got.prompt.total == size
    assert list(got.shared) == [Q, OUT]
    for i, entries in got.shared.items():
        cells = [int(origin[layer, row]) for layer in range(LAYERS) for row in PROMPT.rows(i)]
        for name in ("reused", "corrected", "executed", "prefix_hit"):
            assert getattr(entries, name) == cells.count(Origin[name.upper()])
    rows = [row for i in (Q, OUT) for row in PROMPT.rows(i)]
    assert got.touched_rows == sum(bool(touched[row]) for row in rows)
    assert got.reference_tokens == 0


def test_dense(executor: Executor) -> None:
    got = executor.run(PROMPT, Plan.make(PROMPT)).accounting
    n = len(PROMPT)
    assert got.prompt == Entries(0, 0, LAYERS * n, 0)
    assert got.shared == {
        Q: Entries(0, 0, LAYERS * 8, 0),
        OUT: Entries(0, 0, LAYERS * 5, 0),
    }
    assert (got.touched_rows, got.row_layers) == (13, LAYERS * n)


def caches(executor: Executor) -> tuple[Fill, Fill]:
    buffer = executor.run(PROMPT, Plan.make(PROMPT), hidden_layers=(2,)).buffer
    q, out = (Fill(i, buffer.extract(PROMPT.rows(i))) for i in (Q, OUT))
    return q, out


def test_reuse_is_what_the_executor_did_not_write(executor: Executor) -> None:
    got = executor.run(PROMPT, Plan.make(PROMPT, caches(executor))).accounting
    assert got.prompt == Entries(LAYERS * 13, 0, LAYERS * 11, 0)
    assert got.shared[Q] == Entries(LAYERS * 8, 0, 0, 0)
    assert (got.touched_rows, got.row_layers) == (0, LAYERS * 11)


def test_a_last_row_inside_a_reused_segment_is_executed(executor: Executor) -> None:
    prompt = Prompt(PROMPT.segments[:5])
    _, out = caches(executor)
    got = executor.run(prompt, Plan.make(prompt, (out,))).accounting
    assert got.shared[OUT] == Entries(LAYERS * 4, 0, LAYERS, 0)
    assert got.shared[Q].executed == LAYERS * 8
    assert got.touched_rows == 9


def test_partial_schedules(executor: Executor) -> None:
    q, out = caches(executor)
    p, o = torch.arange(6, 14), torch.arange(17, 22)
    extra = (
        Enter(2, p, q.cache.residual(2)),
        Leave(3, p),
        Enter(0, o, write=False),
        Select(1, o, lambda c: c.rows[:2]),
    )
    got = executor.run(PROMPT, Plan.make(PROMPT, (q, out), extra=extra)).accounting
    assert got.shared[Q] == Entries(3 * 8, 0, 8, 0)
    # Executed unwritten at layer 0; two rows from layer 1 on.
    assert got.shared[OUT] == Entries(20 - 3 * 2, 0, 3 * 2, 0)
    assert got.touched_rows == 13
    assert got.row_layers == LAYERS * 11 + 8 + 5 + 5 + 2 * 2
    assert got.prompt.total == LAYERS * len(PROMPT)


@pytest.mark.parametrize("kind", ["dense", "reused", "all_logits", "left", "selected"])
def test_flops_are_those_that_pytorch_counts(executor: Executor, kind: str) -> None:
    """Projections, MLP and logits by PyTorch's counter, attention by the pairs seen."""
    (q, _), n, p = caches(executor), len(PROMPT), torch.arange(6, 14)
    causal = sum(range(1, n + 1))
    own = sum(row + 1 for row in range(n) if row not in p.tolist())
    # Per layer, pairs of query and key; the last layer needs only the rows whose logits are wanted.
    plan, pairs = Plan.make(PROMPT), [causal] * 3 + [n]
    if kind == "reused":
        plan, pairs = Plan.make(PROMPT, (q,)), [own] * 3 + [n]
    elif kind == "all_logits":
        pairs = [causal] * 4
    elif kind == "left":
        # In layer 1, their last one, the rows only give their K and V.
        plan = Plan.make(PROMPT, (q,), extra=(Enter(0, p), Leave(2, p)))
        pairs = [causal, own, own, n]
    elif kind == "selected":
        extra = (Enter(0, p), Select(1, p, lambda c: c.rows[2:3]))
        plan, pairs = Plan.make(PROMPT, (q,), extra=extra), [causal, own + 9, own + 9, n]
    with FlopCounterMode(display=False) as counter:
        run = executor.run(PROMPT, plan, all_logits=kind == "all_logits")
    counts = counter.get_flop_counts()["Global"]
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
    linear = sum(counts.get(product, 0) for product in products)
    spec = executor.model.spec
    attention = sum(4 * spec.heads * spec.head_dim * seen for seen in pairs)
    assert run.accounting.flops == linear + attention
