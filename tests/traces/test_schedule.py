from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.errors import UserError
from traces.generator import GeneratorSettings, generate
from traces.schedule import (
    Schedule,
    Transition,
    Unit,
    controlled_schedule,
    even_hops,
    even_schedule,
    readings,
    realised_rho,
)
from traces.schema import TraceWorkflow

Workflows = tuple[TraceWorkflow, ...]


def first_readings(workflows: Workflows) -> set[Transition]:
    return {r.transition for w in workflows for turn in readings(w) for r in turn if r.first}


def test_readings_of_layout_t(workflows: Workflows) -> None:
    turns = list(readings(workflows[0]))
    assert [[r.transition.slot for r in turn] for turn in turns] == [
        ["q"],
        ["q", "out0"],
        ["q", "out0", "out1"],
        ["q", "out0", "out1", "out2"],
    ]
    # An output is held by its producer; the query by nobody until the first turn has read it.
    assert [r.first for turn in turns for r in turn] == [True] + 9 * [False]
    assert [r.tokens for r in turns[1]] == [32, 2]
    assert turns[1][0].transition == (workflows[0].request, "A1", "q")


@pytest.mark.parametrize("unit", ["transition", "hop"])
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6, 2 / 3, 0.8, 0.9, 1.0])
def test_rho_is_held_exactly(workflows: Workflows, rho: float, unit: Unit) -> None:
    schedule = controlled_schedule(workflows, rho, unit=unit, seed=5)
    later = {t: a for t, a in schedule.accept.items() if t not in first_readings(workflows)}
    assert len(later) == 180
    if unit == "hop":
        hops = {(t.request, t.node): {a for u, a in later.items() if u[:2] == t[:2]} for t in later}
        assert all(len(decisions) == 1 for decisions in hops.values())
        assert sum(decisions == {True} for decisions in hops.values()) == round(60 * rho)
    else:
        assert sum(later.values()) == round(180 * rho)
    # 20 first readings have a series of their own.
    assert sum(schedule.accept[t] for t in first_readings(workflows)) == round(20 * rho)
    real = realised_rho(schedule, workflows)
    assert real.transitions == pytest.approx(sum(later.values()) / 180)
    assert real.tokens == pytest.approx(rho, abs=0.02)
    assert (real.calls <= real.transitions) or unit == "hop"


def test_dense_transitions_are_spread(workflows: Workflows) -> None:
    """Each slot, and each workflow of a slot, gets its share to within one transition."""
    for rho in (0.8, 0.6, 2 / 3):
        schedule = controlled_schedule(workflows, rho, seed=1)
        first = first_readings(workflows)
        later = [t for t in schedule.accept if t not in first]
        for key in (lambda t: t.slot, lambda t: (t.slot, t.request)):
            size = Counter(key(t) for t in later)
            dense = Counter(key(t) for t in later if not schedule.accept[t])
            assert all(abs(dense[k] - n * (1 - rho)) < 1 for k, n in size.items())
        # No agent is spared and none is always hit, also where the period divides the turns.
        hit = Counter(t.node for t in later if t.slot == "q" and not schedule.accept[t])
        assert set(hit) == {"A1", "A2", "A3"}


def test_the_seed_moves_dense_transitions(workflows: Workflows) -> None:
    a, b = (controlled_schedule(workflows, 0.8, seed=seed) for seed in (0, 1))
    assert controlled_schedule(workflows, 0.8, seed=0) == a
    assert a.accept != b.accept
    assert a.settings == {"schedule": "controlled", "rho": 0.8, "unit": "transition", "seed": 0}


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.floats(0, 1),
    st.sampled_from(["transition", "hop"]),
    st.integers(0, 99),
)
def test_any_schedule_decides_everything(
    n: int, agents: int, rho: float, unit: Unit, seed: int
) -> None:
    made = generate(GeneratorSettings(vocab=9, scale=1e3, workflows=n, agents=agents))
    schedule = controlled_schedule(made, rho, unit=unit, seed=seed)
    read = [r for w in made for turn in readings(w) for r in turn]
    assert set(schedule.accept) == {r.transition for r in read}
    real = realised_rho(schedule, made)
    if agents == 1:
        assert math.isnan(real.tokens)
        return
    if unit == "transition":
        later = sum(not r.first for r in read)
        assert abs(real.transitions * later - rho * later) <= 0.5 + 1e-9


@pytest.mark.parametrize(("rho", "dense", "refills", "full"), [(0.8, 10, 4, 31), (0.6, 20, 7, 44)])
def test_public_harness_at_68_requests(rho: float, dense: int, refills: int, full: int) -> None:
    """Full prefills: 17 first hops, dense later hops, and refills after dense first hops."""
    kinds = even_hops([4] * 17, rho)
    assert len(kinds) == 68
    firsts, later = kinds[::4], [kind for i, kind in enumerate(kinds) if i % 4]
    assert Counter(firsts) == {"first": 17 - refills, "dense": refills}
    assert Counter(later) == {"dense": dense, "refill": refills, "reused": 68 - full}
    assert 17 + dense + refills == full


def test_full_prefills_of_the_public_harness() -> None:
    def full(rho: float) -> int:
        return sum(kind != "reused" for kind in even_hops([4] * 17, rho))

    assert (full(0.8), full(0.6)) == (31, 44)
    assert 68 / full(0.8) == pytest.approx(2.19, abs=0.005)
    assert 68 / full(0.6) == pytest.approx(1.55, abs=0.005)
    assert (full(1.0), full(0.0)) == (17, 68)


def test_public_schedule_makes_whole_hops_dense(workflows: Workflows) -> None:
    schedule = even_schedule(workflows, 0.8)
    kinds = even_hops([4] * 20, 0.8)
    decided = [
        {schedule.accept[r.transition] for r in turn} for w in workflows for turn in readings(w)
    ]
    assert decided == [{kind in ("first", "reused")} for kind in kinds]
    # Of the 60 hops that could reuse, refills refuse on top of the dense ones.
    reused = realised_rho(schedule, workflows).calls * 60
    assert reused == pytest.approx(kinds.count("reused"))
    assert reused < 0.8 * 60


def test_rho_counts_tokens_transitions_and_calls() -> None:
    (workflow,) = generate(
        GeneratorSettings(vocab=99, shared=100, output=10, workflows=1, agents=3)
    )
    read = [r.transition for turn in readings(workflow) for r in turn]
    refused = Transition(workflow.request, "A2", "out1")
    schedule = Schedule({t: t != refused for t in read}, {})
    real = realised_rho(schedule, [workflow])
    assert real.tokens == pytest.approx(220 / 230)
    assert real.transitions == pytest.approx(4 / 5)
    assert real.calls == pytest.approx(1 / 2)
    with_first = realised_rho(schedule, [workflow], include_first=True)
    assert with_first.transitions == pytest.approx(5 / 6)
    assert with_first.calls == pytest.approx(2 / 3)


def test_force_is_by_segment_and_only_for_this_trace(workflows: Workflows) -> None:
    schedule = controlled_schedule(workflows, 0.5)
    turn = workflows[0].turns[2]
    force = schedule.force(workflows[0].request, "A2", turn.prompt)
    assert list(force) == list(turn.prompt.shared()) == [1, 4, 6]
    assert force[4] == schedule.accept[Transition(workflows[0].request, "A2", "out0")]
    with pytest.raises(ValueError, match="does not know"):
        schedule.force("another", "A2", turn.prompt)


def test_bad_input(workflows: Workflows) -> None:
    for rho in (-0.1, 1.1, math.nan):
        with pytest.raises(UserError, match="rho"):
            controlled_schedule(workflows, rho)
        with pytest.raises(UserError, match="rho"):
            even_hops([4], rho)
    with pytest.raises(UserError, match="unit"):
        controlled_schedule(workflows, 0.8, unit="row")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="two workflows"):
        controlled_schedule(workflows + workflows, 0.8)
