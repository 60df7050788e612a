"""What entering, leaving and selecting rows mean; any schedule against a plain interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvcmas.engine.cache import Origin, SegmentCache
from kvcmas.engine.contract import (
    Candidates,
    Enter,
    Event,
    Fill,
    Leave,
    Plan,
    Select,
    filled_rows,
    unfilled_rows,
)
from kvcmas.engine.executor import Executor, Prefill
from kvcmas.engine.segments import Prompt, Segment, pf, ph
from tests.engine.naive import interpret
from tests.workflows import random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LAYERS, KV_HEADS, DIM, HIDDEN = 4, 2, 32, 256  # of both tiny models
CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}
PROMPT = Prompt(
    (
        pf(random_ids(1, 6)),
        ph("q", random_ids(2, 8)),
        pf(random_ids(3, 3)),
        ph("out0", random_ids(4, 6)),
        pf(random_ids(5, 4)),
    )
)
Q, OUT = 1, 3
P = torch.arange(6, 14)  # rows of q


def garbage(tokens: int, seed: int = 0) -> SegmentCache:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, LAYERS, KV_HEADS, tokens, DIM, generator=generator).unbind()
    hidden = torch.randn(LAYERS, tokens, HIDDEN, generator=generator)
    return SegmentCache(k, v, dict(enumerate(hidden.unbind())))


@dataclass(frozen=True)
class Shift:
    """A correction that is easy to recognise."""

    rows: int

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        k += 0.1 * layer
        v -= 0.2 * layer


def aligned(executor: Executor, cache: SegmentCache, segment: int) -> tuple[Tensor, Tensor]:
    """A fill as it stands in the buffer."""
    return executor.model.rope.align(cache.k, PROMPT.rows(segment).start), cache.v


def at(prefill: Prefill, rows: Tensor) -> tuple[Tensor, Tensor]:
    return prefill.buffer.k[:, :, rows], prefill.buffer.v[:, :, rows]


def executed(prefill: Prefill) -> Tensor:
    return prefill.buffer.origin == Origin.EXECUTED


@pytest.fixture(scope="module")
def dense(executor: Executor) -> Prefill:
    return executor.run(PROMPT, Plan.make(PROMPT), hidden_layers=range(LAYERS))


def assert_same(got: Prefill, expected: Prefill) -> None:
    torch.testing.assert_close(got.buffer.k, expected.buffer.k, **CLOSE)
    torch.testing.assert_close(got.buffer.v, expected.buffer.v, **CLOSE)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)


def test_filled_and_unfilled_rows_part_the_prompt() -> None:
    last = Fill(4, garbage(4))
    for fills in ((), (Fill(Q, garbage(8)),), (Fill(Q, garbage(8)), last)):
        unfilled, filled = unfilled_rows(PROMPT, fills), filled_rows(PROMPT, fills)
        assert sorted([*unfilled.tolist(), *filled.tolist()]) == list(range(len(PROMPT)))
        # The last row gives the first logits, even where a fill covers it.
        assert unfilled[-1] == len(PROMPT) - 1
    assert filled_rows(PROMPT, (last,)).tolist() == [23, 24, 25]


def test_a_fill_is_aligned_and_its_correction_starts_at_layer_1(executor: Executor) -> None:
    cache = garbage(8)
    before = cache.k.clone(), cache.v.clone()
    run = executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, cache, Shift(5)),)))
    shift = torch.arange(LAYERS)[:, None, None, None]
    k, v = cache.k.clone(), cache.v.clone()
    k[:, :, :5] += 0.1 * shift
    v[:, :, :5] -= 0.2 * shift
    k = executor.model.rope.align(k, 6)
    for got, expected in zip(at(run, P), (k, v), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    origin = run.buffer.origin[:, P]
    assert bool((origin[0] == Origin.REUSED).all())
    assert bool((origin[1:, :5] == Origin.CORRECTED).all())
    assert bool((origin[1:, 5:] == Origin.REUSED).all())
    # Sources are immutable: the correction went into the target only.
    assert torch.equal(cache.k, before[0])
    assert torch.equal(cache.v, before[1])


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_entering_with_the_exact_hidden_state_is_dense_from_there_on(
    executor: Executor, dense: Prefill, layer: int
) -> None:
    """Exact source below ``layer``, garbage above: nothing of the garbage may survive."""
    exact, wrong = dense.buffer.extract(PROMPT.rows(Q)), garbage(8)
    wrong.k[:layer], wrong.v[:layer] = exact.k[:layer], exact.v[:layer]
    enter = Enter(layer, P, dense.buffer.hidden[layer][P])
    run = executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, wrong),), extra=(enter,)))
    assert_same(run, dense)
    assert bool(executed(run)[layer:, P].all())
    assert not bool(executed(run)[:layer, P].any())


def test_a_fill_that_is_executed_from_layer_0_is_dense(executor: Executor, dense: Prefill) -> None:
    plan = Plan.make(PROMPT, (Fill(Q, garbage(8)),), extra=(Enter(0, P),))
    run = executor.run(PROMPT, plan)
    assert_same(run, dense)
    assert run.buffer.exact(len(PROMPT))


def test_rows_may_enter_in_any_order(executor: Executor, dense: Prefill) -> None:
    """The first to enter, at a later layer, and with their residual rows alongside."""
    order = torch.randperm(len(PROMPT), generator=torch.Generator().manual_seed(1))
    assert_same(executor.run(PROMPT, Plan((), (Enter(0, order),), ())), dense)
    exact, shuffled = dense.buffer.extract(PROMPT.rows(Q)), P[torch.randperm(8)]
    enter = Enter(2, shuffled, dense.buffer.hidden[2][shuffled])
    run = executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, exact),), extra=(enter,)))
    assert_same(run, dense)


def test_nothing_has_to_be_active_in_the_first_layers(executor: Executor, dense: Prefill) -> None:
    """All rows filled exactly below layer 2, where they enter."""
    fills = tuple(
        Fill(i, dense.buffer.extract(PROMPT.rows(i))) for i in range(len(PROMPT.segments))
    )
    rows = torch.arange(len(PROMPT))
    run = executor.run(PROMPT, Plan(fills, (Enter(2, rows, dense.buffer.hidden[2][rows]),), ()))
    assert_same(run, dense)
    assert run.accounting.row_layers == 2 * len(PROMPT)


def test_rows_that_do_not_write_leave_the_fill_and_still_run(
    executor: Executor, dense: Prefill
) -> None:
    cache = garbage(8)
    plan = Plan.make(PROMPT, (Fill(Q, cache),), extra=(Enter(0, P, write=False),))
    run = executor.run(PROMPT, plan, hidden_layers=(1,))
    for got, expected in zip(at(run, P), aligned(executor, cache, Q), strict=True):
        assert torch.equal(got, expected)
    assert not bool(executed(run)[:, P].any())
    assert run.accounting.touched_rows == 8 + len(PROMPT.rows(OUT))
    # They were executed: the rows before them are dense, so the first is off by its own K, V only.
    assert not torch.equal(run.buffer.hidden[1][P], cache.residual(1))
    assert bool(run.buffer.hidden[1].isfinite().all())


@pytest.mark.parametrize("layer", range(1, LAYERS + 1))
def test_rows_that_left_hold_the_fill(executor: Executor, layer: int) -> None:
    cache = garbage(8)
    extra = (Enter(0, P), Leave(layer, P))
    run = executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, cache),), extra=extra))
    assert bool(executed(run)[:layer, P].all())
    assert not bool(executed(run)[layer:, P].any())
    for got, expected in zip(at(run, P), aligned(executor, cache, Q), strict=True):
        assert torch.equal(got[layer:], expected[layer:])
    others = len(PROMPT) - 8
    assert run.accounting.row_layers == LAYERS * others + layer * 8


def test_rows_may_come_back(executor: Executor, dense: Prefill) -> None:
    exact = dense.buffer.extract(PROMPT.rows(Q))
    extra = (Enter(0, P), Leave(1, P), Enter(3, P, dense.buffer.hidden[3][P]))
    run = executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, exact),), extra=extra))
    assert_same(run, dense)
    assert executed(run)[:, P].all(dim=1).tolist() == [True, False, False, True]


def selecting(cache: SegmentCache, select: Select) -> Plan:
    return Plan.make(PROMPT, (Fill(Q, cache),), extra=(Enter(0, P, write=False), select))


def test_candidates_are_fresh_and_buffered_rows(executor: Executor, dense: Prefill) -> None:
    cache, seen = garbage(8), list[Candidates]()

    def choose(candidates: Candidates) -> Tensor:
        seen.append(candidates)
        return candidates.rows[:0]

    executor.run(PROMPT, selecting(cache, Select(0, P, choose)))
    (candidates,) = seen
    assert candidates.layer == 0
    assert torch.equal(candidates.rows, P)
    k_old, v_old = aligned(executor, cache, Q)
    assert torch.equal(candidates.k_old, k_old[0])
    assert torch.equal(candidates.v_old, v_old[0])
    torch.testing.assert_close(candidates.k_new, dense.buffer.k[0, :, P], **CLOSE)
    torch.testing.assert_close(candidates.v_new, dense.buffer.v[0, :, P], **CLOSE)


@pytest.mark.parametrize("write_all", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_selected_rows_are_scattered_from_there_on(
    executor: Executor, layer: int, write_all: bool
) -> None:
    cache = garbage(8)
    select = Select(layer, P, lambda c: c.rows[[5, 1]], write_all)
    run = executor.run(PROMPT, selecting(cache, select))
    written = torch.zeros(LAYERS, len(PROMPT), dtype=torch.bool)
    written[layer:, [7, 11]] = True
    if write_all:
        written[layer, P] = True
    assert torch.equal(executed(run)[:, P], written[:, P])
    k, v = aligned(executor, cache, Q)
    old = ~written[:, P][:, None, :, None].expand_as(k)
    assert torch.equal(at(run, P)[0][old], k[old])
    assert torch.equal(at(run, P)[1][old], v[old])
    others = len(PROMPT) - 8
    assert run.accounting.row_layers == LAYERS * others + (layer + 1) * 8 + (3 - layer) * 2


def test_selecting_all_changes_nothing_and_none_is_full_reuse(
    executor: Executor, dense: Prefill
) -> None:
    cache = garbage(8)
    everything = executor.run(PROMPT, selecting(cache, Select(0, P, lambda c: c.rows)))
    assert_same(everything, dense)
    nothing = executor.run(PROMPT, selecting(cache, Select(1, P, lambda c: c.rows[:0])))
    assert_same(nothing, executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, cache),))))


@pytest.mark.parametrize(("layer", "kept", "exact"), [(1, 8, 27), (1, 7, 13), (2, 8, 6)])
def test_exact_counts_every_layer_but_the_first(
    executor: Executor, layer: int, kept: int, exact: int
) -> None:
    """Reused at layer 0 and executed above is as good as dense."""
    select = Select(layer, P, lambda c: c.rows[:kept])
    buffer = executor.run(PROMPT, selecting(garbage(8), select)).buffer
    assert [buffer.exact(rows) for rows in (0, exact)] == [True, True]
    assert buffer.exact(len(PROMPT)) == (exact == len(PROMPT))
    assert exact == len(PROMPT) or not buffer.exact(exact + 1)


def test_dropped_rows_are_no_candidates_any_more(executor: Executor) -> None:
    seen = list[list[int]]()

    def first_half(candidates: Candidates) -> Tensor:
        seen.append(candidates.rows.tolist())
        return candidates.rows[: len(candidates.rows) // 2]

    extra: tuple[Event, ...] = (
        Enter(0, P, write=False),
        *(Select(layer, P, first_half) for layer in range(LAYERS)),
    )
    executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, garbage(8)),), extra=extra))
    assert seen == [[*range(6, 14)], [6, 7, 8, 9], [6, 7], [6]]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("which", ["k", "v"])
def test_reuse_bites(executor: Executor, dense: Prefill, layer: int, which: str) -> None:
    """Perturbing one reused (layer, row) entry changes the logits."""
    exact = dense.buffer.extract(PROMPT.rows(Q))
    other = SegmentCache(exact.k.clone(), exact.v.clone())
    getattr(other, which)[layer, :, 3] += 1.0
    runs = [executor.run(PROMPT, Plan.make(PROMPT, (Fill(Q, c),))) for c in (exact, other)]
    assert_same(runs[0], dense)
    assert float((runs[1].logits - runs[0].logits).abs().max()) > 1e-3


SEGMENTS = {
    "q": ph("q", random_ids(1, 7)),
    "out0": ph("out0", random_ids(2, 5)),
    "obs0": ph("obs0", random_ids(3, 1)),
    "out1": ph("out1", ()),
    "glue": pf(random_ids(4, 3)),
    "nothing": pf(()),
}


@settings(deadline=None, max_examples=40)
@given(st.permutations(sorted(SEGMENTS)), st.data())
def test_any_order_and_any_hit_runs(
    executor: Executor, names: list[str], data: st.DataObject
) -> None:
    """Reordered, empty, partial and full hits (LMCache #938): entries add up, layer 0 is exact."""
    cut = data.draw(st.integers(1, len(names)))
    segments: tuple[Segment, ...] = tuple(SEGMENTS[name] for name in names[:cut])
    if not any(segments):
        segments += (SEGMENTS["glue"],)
    prompt = Prompt(segments)
    fills = []
    for i, segment in enumerate(segments):
        if data.draw(st.booleans()):
            source = Prompt((segment, pf([9])))
            cache = executor.run(source, Plan.make(source)).buffer.extract(source.rows(0))
            fills.append(Fill(i, cache))
    run = executor.run(prompt, Plan.make(prompt, tuple(fills)))
    assert run.logits.shape[0] == 1
    assert run.accounting.prompt.total == LAYERS * len(prompt)
    filled = len(filled_rows(prompt, tuple(fills)))
    assert run.accounting.prompt.reused == LAYERS * filled
    assert bool(executed(run)[:, -1].all())
    dense = executor.run(prompt, Plan.make(prompt)).buffer
    torch.testing.assert_close(run.buffer.k[0], dense.k[0], **CLOSE)
    torch.testing.assert_close(run.buffer.v[0], dense.v[0], **CLOSE)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Prompt, Plan]:
    """A prompt of random segments, random fills, and random events on the filled rows."""
    prompt = Prompt(
        tuple(
            ph(f"s{i}", random_ids(i, length)) if shared else pf(random_ids(i, length))
            for i, (shared, length) in enumerate(
                draw(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=2, max_size=5))
            )
        )
    )
    fills = []
    for i, segment in enumerate(prompt.segments):
        if draw(st.booleans()):
            correction = Shift(draw(st.integers(0, len(segment)))) if draw(st.booleans()) else None
            fills.append(Fill(i, garbage(len(segment), seed=i), correction))
    free = filled_rows(prompt, tuple(fills)).tolist()
    layers = st.integers(0, LAYERS - 1)

    def some(rows: list[int]) -> Tensor:
        chosen = [row for row in rows if draw(st.booleans())]
        return torch.tensor(draw(st.permutations(chosen)), dtype=torch.long)

    events: list[Event] = []
    entered, remaining = list[int](), free
    for _ in range(draw(st.integers(0, 2))):
        rows, layer = some(remaining), draw(layers)
        generator = torch.Generator().manual_seed(layer)
        hidden = torch.randn(len(rows), HIDDEN, generator=generator) if layer else None
        events.append(Enter(layer, rows, hidden, draw(st.booleans())))
        entered += rows.tolist()
        remaining = [row for row in remaining if row not in entered]
    for _ in range(draw(st.integers(0, 2))):
        events.append(Leave(draw(st.integers(LAYERS - 1, LAYERS)), some(entered)))
    for layer in draw(st.lists(layers, max_size=2, unique=True)):
        rows, share = some(free).sort().values, draw(st.sampled_from([0, 2, 3]))

        def choose(candidates: Candidates, share: int = share) -> Tensor:
            """By row where ``share`` says, else where values moved more than their mean."""
            if share:
                return candidates.rows[candidates.rows % share == 0]
            moved = (candidates.v_new - candidates.v_old).square().sum(dim=(0, 2))
            return candidates.rows[moved > moved.mean()]

        events.append(Select(layer, rows, choose, draw(st.booleans())))
    return prompt, Plan.make(prompt, tuple(fills), extra=tuple(events))


@settings(deadline=None, max_examples=60)
@given(plans())
def test_any_schedule_equals_the_plain_interpreter(
    executor: Executor, hf: PreTrainedModel, case: tuple[Prompt, Plan]
) -> None:
    prompt, plan = case
    expected, got = interpret(hf, prompt, plan), executor.run(prompt, plan)
    assert torch.equal(got.buffer.origin, expected.origin)
    torch.testing.assert_close(got.buffer.k, expected.k, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.buffer.v, expected.v, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.logits[0], expected.logits, atol=2e-4, rtol=0)
    assert got.accounting.row_layers == expected.row_layers
    touched = [expected.touched[row] for i in prompt.shared() for row in prompt.rows(i)]
    assert got.accounting.touched_rows == sum(touched)
