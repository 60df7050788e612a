from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.errors import UserError
from traces.generator import GeneratorSettings, Lengths, Seeds, generate, write_generated
from traces.schema import TraceWorkflow, read_trace

SMALL = GeneratorSettings(vocab=1000, scale=32, workflows=3)


def segments(workflow: TraceWorkflow) -> list[list[tuple[str | None, tuple[int, ...]]]]:
    return [[(s.slot, s.ids) for s in turn.segments] for turn in workflow.turns]


def own(workflow: TraceWorkflow) -> list[list[tuple[int, ...]]]:
    return [[ids for slot, ids in turn if slot is None] for turn in segments(workflow)]


def query(workflow: TraceWorkflow) -> tuple[int, ...]:
    return dict(segments(workflow)[0])["q"]


@pytest.mark.parametrize("shared", [2048, 8192])
def test_layout_t_unscaled(shared: int) -> None:
    (workflow,) = generate(GeneratorSettings(vocab=50_000, shared=shared, output=128, workflows=1))
    shapes = [[(slot, len(ids)) for slot, ids in turn] for turn in segments(workflow)]
    opening = [(None, 1024), ("q", shared), (None, 512)]
    assert shapes[0] == [*opening, (None, 5)]
    earlier = [part for k in range(3) for part in ((None, 16), (f"out{k}", 128))]
    assert shapes[3] == [*opening, *earlier, (None, 5)]
    outputs = [turn.output for turn in workflow.turns]
    assert dict(segments(workflow)[3])["out1"] == outputs[1]
    assert [turn.parents for turn in workflow.turns][2] == ("A0", "A1")


def test_layout_l0_reads_the_shared_span_only() -> None:
    (workflow,) = generate(GeneratorSettings(vocab=1000, layout="L0", shared=100, workflows=1))
    shapes = [[(slot, len(ids)) for slot, ids in turn] for turn in segments(workflow)]
    assert shapes == [[(None, 64), ("q", 100), (None, 16)]] * 4
    assert all(len(turn.output) == 128 for turn in workflow.turns)


def test_agents_recur_and_shared_spans_do_not() -> None:
    a, b, c = generate(SMALL)
    assert own(a) == own(b) == own(c)
    assert len({query(w) for w in (a, b, c)}) == 3
    assert len({turn.output for w in (a, b, c) for turn in w.turns}) == 12
    assert len({w.request for w in (a, b, c)}) == 3
    # System prompts of different agents differ, or there would be nothing to correct.
    assert len({turn[0] for turn in own(a)}) == 4


def test_every_source_of_randomness_has_its_own_seed() -> None:
    (base,) = generate(replace(SMALL, workflows=1))

    def with_seeds(**seeds: int) -> TraceWorkflow:
        return generate(replace(SMALL, workflows=1, seeds=Seeds(**seeds)))[0]

    other = with_seeds(shared=1)
    assert query(other) != query(base)
    assert own(other) == own(base)
    assert [t.output for t in other.turns] == [t.output for t in base.turns]
    other = with_seeds(output=1)
    assert query(other) == query(base)
    assert [t.output for t in other.turns] != [t.output for t in base.turns]
    for source, changed in (("system", [0]), ("private", [1, 2])):
        turn, before = own(with_seeds(**{source: 1}))[0], own(base)[0]
        assert [i for i, ids in enumerate(turn) if ids != before[i]] == changed


def test_equal_seeds_do_not_make_sources_equal() -> None:
    lengths = SMALL.lengths
    (workflow,) = generate(replace(SMALL, workflows=1))
    n = min(lengths.system, lengths.private)
    system, private, _ = own(workflow)[0]
    assert len({system[:n], private[:n], query(workflow)[:n]}) == 3


@given(st.integers(1, 4), st.integers(0, 3))
def test_fewer_workflows_are_the_beginning_of_more(n: int, more: int) -> None:
    settings = GeneratorSettings(vocab=50, scale=256, workflows=n)
    assert generate(replace(settings, workflows=n + more))[:n] == generate(settings)


@given(st.floats(0.01, 1e4))
def test_scaling_keeps_what_is_there(scale: float) -> None:
    whole = Lengths(1024, 2048, 512, 16, 0, 128)
    for part, scaled in zip(astuple(whole), astuple(whole.scaled(scale)), strict=True):
        assert scaled == 0 if part == 0 else scaled >= 1
        assert part == 0 or scaled == 1 or abs(scaled - part / scale) <= 0.5


def test_special_ids_are_never_drawn() -> None:
    special = frozenset({0, 7, 19, 5000})
    settings = GeneratorSettings(vocab=20, scale=8, workflows=1, exclude=special)
    (workflow,) = generate(settings)
    drawn = {i for turn in workflow.turns for i in (*turn.prompt.ids, *turn.output)}
    assert drawn == set(range(20)) - special


def test_positions_are_those_of_the_longest_turn() -> None:
    for settings in (SMALL, replace(SMALL, layout="L0")):
        turns = generate(settings)[0].turns
        assert settings.positions == max(len(t.prompt) + len(t.output) for t in turns)


def test_the_header_holds_what_makes_the_file_again(tmp_path: Path) -> None:
    settings = replace(SMALL, seeds=Seeds(1, 2, 3, 4), exclude=frozenset({3, 1}))
    trace = write_generated(tmp_path / "t.jsonl", settings)
    origin = read_trace(tmp_path / "t.jsonl").header.origin
    assert origin["generator_version"] == 1
    assert origin["scale"] == 32
    assert origin["lengths"]["system"] == 32
    kept = {k: v for k, v in origin.items() if k not in ("generator_version", "lengths")}
    again = GeneratorSettings(
        **kept | {"seeds": Seeds(**kept["seeds"]), "exclude": frozenset(kept["exclude"])}
    )
    assert again == settings
    assert write_generated(tmp_path / "u.jsonl", again).header.sha256 == trace.header.sha256
    assert (tmp_path / "u.jsonl").read_bytes() == (tmp_path / "t.jsonl").read_bytes()


def test_the_ids_of_this_generator_version() -> None:
    """Change this together with GENERATOR_VERSION: old files must not be made differently."""
    settings = GeneratorSettings(vocab=1000, scale=512, workflows=1, agents=1)
    (turn,) = generate(settings)[0].turns
    assert [s.ids for s in turn.segments] == [(500, 810), (956, 551, 421, 60), (989,), (677,)]
    assert turn.output == (962,)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "X"},
        {"vocab": 0},
        {"shared": 0},
        {"workflows": 0},
        {"scale": 0},
        {"scale": float("nan")},
        {"seeds": Seeds(shared=-1)},
        {"exclude": frozenset(range(1000))},
    ],
)
def test_what_cannot_be_generated(changes: dict[str, object]) -> None:
    with pytest.raises(UserError):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_later_rounds_read_the_round_before_too() -> None:
    (workflow,) = generate(replace(SMALL, workflows=1, agents=2, rounds=2))
    assert [turn.node.name for turn in workflow.turns] == ["A0", "A1", "A0@2", "A1@2"]
    shared = [[slot for slot, _ in turn if slot] for turn in segments(workflow)]
    assert shared[2:] == [["q", "out0", "out1"], ["q", "out0", "out1", "out0@2"]]
    assert len({turn.output for turn in workflow.turns}) == 4
    held = {turn.node.out_slot: turn.output for turn in workflow.turns}
    assert dict(segments(workflow)[3])["out0@2"] == held["out0@2"]
    (once,) = generate(replace(SMALL, workflows=1, agents=2))
    assert segments(once) == segments(workflow)[:2]


def test_one_round_is_named_as_before() -> None:
    assert "rounds" not in SMALL.origin and replace(SMALL, rounds=2).origin["rounds"] == 2
