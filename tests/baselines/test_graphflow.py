"""GraphFlow: calibration, the delta it leaves, and how reuse below 100% comes about."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.graphflow import GraphFlow
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Plan, State, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine
from kvcmas.errors import UserError
from tests import replay
from tests.replay import WORKFLOW, Truth, reasons, replayed
from tests.workflows import FixedSources, random_ids

RELATIONS = 4 + 3 + 2 + 1  # q into four turns, each output into the later ones
Dense = Callable[..., Truth]


def context_delta(executor: Executor, turn: Prompt) -> tuple[SegmentCache, SegmentCache]:
    """Exact target cache of segment 1, and its context-free reference."""
    run = executor.run(turn, Plan.make(turn))
    alone = Prompt((pf(turn.segments[1].ids),))
    reference = executor.run(alone, Plan.make(alone))
    return run.buffer.extract(turn.rows(1)), reference.buffer.extract(alone.rows(0))


@pytest.fixture(scope="module")
def dense(executor: Executor) -> Dense:
    """Dense results by seed and length of the query, made once."""
    return functools.cache(functools.partial(replay.dense, executor.model))


@pytest.fixture(scope="module")
def truth(dense: Dense) -> Truth:
    """Dense results of the request that is served."""
    return dense(5)


def test_calibrated_on_the_very_request_it_is_exact(executor: Executor, truth: Truth) -> None:
    engine = Engine(executor.model, GraphFlow(n_cal=1))
    assert reasons(replayed(engine, truth, "warm")) == {"unknown"}
    results = replayed(engine, truth, "r")
    assert reasons(results) == {"relation"}
    for node, result in results.items():
        expected = truth[node].first_logits
        torch.testing.assert_close(result.first_logits, expected, atol=1e-3, rtol=0)
        assert all(e.corrected == 3 * e.total // 4 for e in result.accounting.shared.values())


def test_calibrated_on_others_it_is_not(executor: Executor, dense: Dense, truth: Truth) -> None:
    engine = Engine(executor.model, GraphFlow(n_cal=2))
    for seed in (60, 61):
        replayed(engine, dense(seed), f"r{seed}")
    results = replayed(engine, truth, "r")
    difference = (results["A3"].first_logits - truth["A3"].first_logits).abs().max()
    assert float(difference) > 1e-2


def test_a_relation_is_dense_until_it_has_seen_n_cal_requests_and_fixed_afterwards(
    executor: Executor,
    dense: Dense,
) -> None:
    method = GraphFlow(n_cal=3)
    engine = Engine(executor.model, method)
    seen = []
    for seed in range(60, 64):
        seen.append(reasons(replayed(engine, dense(seed), f"r{seed}")))
    assert seen == [{"unknown"}, {"calibrating"}, {"calibrating"}, {"relation"}]
    assert len(method.relations) == RELATIONS
    before = dict(method.relations)
    # Not even a dense turn changes it now.
    assert reasons(replayed(engine, dense(64), "r64", force=False)) == {"forced"}
    assert method.relations == before
    assert {r.samples for r in before.values()} == {3}


def test_forced_warm_up_calibrates(executor: Executor, dense: Dense) -> None:
    method = GraphFlow(n_cal=2)
    engine = Engine(executor.model, method)
    for seed in (60, 61):
        replayed(engine, dense(seed), f"r{seed}", force=False)
    assert reasons(replayed(engine, dense(62), "r62")) == {"relation"}


def test_forced_reuse_takes_an_unfinished_mean_but_nothing_unknown(
    executor: Executor, dense: Dense
) -> None:
    engine = Engine(executor.model, GraphFlow(n_cal=5))
    first, second = dense(60), dense(61)
    assert reasons(replayed(engine, first, "a", force=True)) == {"unknown"}
    assert reasons(replayed(engine, second, "b", force=True)) == {"forced"}


def test_the_delta_is_the_mean_over_the_samples_that_reach_a_position(executor: Executor) -> None:
    method = GraphFlow(n_cal=3)
    lengths, deltas = (6, 9, 4), []
    for n, length in enumerate(lengths):
        prompt = Prompt((pf(random_ids(1, 7)), ph("q", random_ids(70 + n, length)), pf([8])))
        target, source = context_delta(executor, prompt)
        turn = Turn(f"r{n}", "A1", 1, prompt)
        sources = FixedSources(references={1: source})
        plan = method.plan(turn, sources)
        run = executor.run(prompt, plan)
        method.after_first_token(turn, sources, plan, run.buffer)
        deltas.append((target.v - source.v)[1:])
    relation = method.relations["q>A1"]
    assert relation.count.tolist() == [3, 3, 3, 3, 2, 2, 1, 1, 1]

    def reaching(position: int) -> Tensor:
        return torch.stack([d[:, :, position] for d in deltas if d.shape[2] > position])

    for position in range(9):
        expected = reaching(position).mean(dim=0)
        got = relation.mean.v[:, :, position]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    squares = [(reaching(p) - reaching(p).mean(0)).square().sum() for p in range(9)]
    assert relation.spread > float(sum(squares))  # keys deviate as well
    assert relation.variance == pytest.approx(
        relation.spread / (sum(lengths) * 2 * deltas[0][:, :, 0].numel())
    )


def test_rows_past_the_calibrated_length_keep_the_reference(executor: Executor) -> None:
    method = GraphFlow(n_cal=1)
    short, long = random_ids(3, 6), random_ids(4, 10)
    for name, ids in (("short", short), ("long", long)):
        prompt = Prompt((pf(random_ids(1, 7)), ph("q", ids), pf([8])))
        _, source = context_delta(executor, prompt)
        turn, sources = Turn(name, "A1", 1, prompt), FixedSources(references={1: source})
        plan = method.plan(turn, sources)
        run = executor.run(prompt, plan)
        method.after_first_token(turn, sources, plan, run.buffer)
    got = run.buffer.extract(prompt.rows(1))
    torch.testing.assert_close(got.k[:, :, 6:], source.k[:, :, 6:], atol=2e-5, rtol=0)
    assert torch.equal(got.v[:, :, 6:], source.v[:, :, 6:])
    mean = method.relations["q>A1"].mean
    torch.testing.assert_close(got.v[1:, :, :6], source.v[1:, :, :6] + mean.v)
    torch.testing.assert_close(got.k[1:, :, :6], source.k[1:, :, :6] + mean.k, atol=2e-5, rtol=0)
    torch.testing.assert_close(got.v[0], source.v[0])


def test_a_shift_of_the_prompt_leaves_the_canonical_delta_alone(executor: Executor) -> None:
    method = GraphFlow(n_cal=1)
    ids, served = random_ids(3, 8), []
    for name, system in (("warm", 7), ("near", 7), ("far", 50)):
        prompt = Prompt((pf(random_ids(1, system)), ph("q", ids), pf([8])))
        _, source = context_delta(executor, prompt)
        turn, sources = Turn(name, "A1", 1, prompt), FixedSources(references={1: source})
        plan = method.plan(turn, sources)
        run = executor.run(prompt, plan)
        method.after_first_token(turn, sources, plan, run.buffer)
        served.append(run.buffer.extract(prompt.rows(1)))
    torch.testing.assert_close(served[2].k, served[1].k, atol=2e-5, rtol=0)
    torch.testing.assert_close(served[2].v, served[1].v, atol=2e-5, rtol=0)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_dense_share(executor: Executor, share: float) -> None:
    """The choice is made per request and edge, is met on average and depends on the seed alone."""
    prompt = Prompt((ph("q", random_ids(1, 4)), pf([8])))
    source = executor.run(prompt, Plan.make(prompt)).buffer.extract(prompt.rows(0))
    sources = FixedSources(references={0: source})

    def choices(method: GraphFlow, order: list[int]) -> dict[int, bool]:
        warm = Turn("warm", "A1", 1, prompt)
        plan = method.plan(warm, sources)
        method.after_first_token(warm, sources, plan, executor.run(prompt, plan).buffer)
        chosen = {}
        for n in order:
            decision = method.plan(Turn(f"r{n}", "A1", 1, prompt), sources).decisions[0]
            assert decision.reason in ("share", "relation")
            chosen[n] = decision.action == "dense"
        return chosen

    order = list(range(400))
    first = choices(GraphFlow(n_cal=1, dense_share=share), order)
    again = choices(GraphFlow(n_cal=1, dense_share=share), order[::-1])
    other = choices(GraphFlow(n_cal=1, dense_share=share, seed=1), order)
    assert first == again
    assert (first == other) == (share in (0, 1))
    assert sum(first.values()) / len(first) == pytest.approx(share, abs=0.06)


def test_dense_relations_are_neither_served_nor_learned(executor: Executor, truth: Truth) -> None:
    method = GraphFlow(n_cal=1, dense_relations=("out0>A2",))
    engine = Engine(executor.model, method)
    replayed(engine, truth, "warm")
    assert "out0>A2" not in method.relations
    assert len(method.relations) == RELATIONS - 1
    results = replayed(engine, truth, "r")
    assert [d.action for d in results["A2"].decisions] == ["correct", "dense", "correct"]


def test_ranking_puts_the_least_reproducible_relation_first(executor: Executor) -> None:
    """q>steady sees one text three times, q>varied three texts."""
    method = GraphFlow(n_cal=3)
    for n in range(3):
        for node, ids in (("steady", random_ids(1, 6)), ("varied", random_ids(80 + n, 6))):
            prompt = Prompt((pf(random_ids(2, 7)), ph("q", ids), pf([8])))
            _, source = context_delta(executor, prompt)
            turn, sources = Turn(f"r{n}", node, 1, prompt), FixedSources(references={1: source})
            plan = method.plan(turn, sources)
            method.after_first_token(turn, sources, plan, executor.run(prompt, plan).buffer)
    (first, large), (second, small) = method.ranking()
    assert (first, second) == ("q>varied", "q>steady")
    assert large > 1e-3
    assert small == pytest.approx(0, abs=1e-9)


def test_sparsity_drops_the_smallest_entries_of_a_finished_delta(
    executor: Executor, truth: Truth
) -> None:
    full, sparse = GraphFlow(n_cal=1), GraphFlow(n_cal=1, sparsity=0.7)
    for method in (full, sparse):
        replayed(Engine(executor.model, method), truth, "warm")
    for name, relation in sparse.relations.items():
        for got, whole in (
            (relation.mean.k, full.relations[name].mean.k),
            (relation.mean.v, full.relations[name].mean.v),
        ):
            kept = got != 0
            assert float(kept.float().mean()) == pytest.approx(0.3, abs=0.01)
            assert torch.equal(got[kept], whole[kept])
            assert whole[~kept].abs().max() <= whole[kept].abs().min()


def test_first_turn_dense(executor: Executor, truth: Truth) -> None:
    method = GraphFlow(n_cal=1, first_turn="dense")
    engine = Engine(executor.model, method)
    replayed(engine, truth, "warm")
    results = replayed(engine, truth, "r")
    assert [d.reason for d in results["A0"].decisions] == ["first"]
    assert torch.equal(results["A0"].first_logits, truth["A0"].first_logits)
    assert len(method.relations) == RELATIONS - 1


def test_reference_is_on_the_path_only_where_it_is_used(executor: Executor, truth: Truth) -> None:
    class Spy(FixedSources):
        def reference(self, segment: int) -> SegmentCache:
            raise AssertionError("a dense turn needs no reference before its first token")

    method = GraphFlow(n_cal=1)
    method.plan(Turn("r", "A0", 0, truth["A0"].prompt), Spy())
    assert not method.wants.background_reference
    assert GraphFlow(reference="background").wants.background_reference


def test_inexact_samples_are_counted(executor: Executor, truth: Truth) -> None:
    method = GraphFlow(n_cal=1, first_turn="dense")
    engine = Engine(executor.model, method)
    session = engine.session(WORKFLOW, "warm")
    for node in WORKFLOW.nodes[:2]:
        # Only the query's relation is calibrated here; the output's comes after a corrected PH.
        result = truth[node.name]
        session.run(node, result.prompt, max_new_tokens=0, output=result.output)
    del method.relations["out0>A1"]
    replayed(engine, truth, "r")
    assert method.relations["q>A1"].inexact == 0
    assert method.relations["out0>A1"].inexact == 1


def test_state_round_trip_continues_like_an_uninterrupted_run(
    executor: Executor, dense: Dense
) -> None:
    whole, first, second = (GraphFlow(n_cal=2, dense_share=0.3) for _ in range(3))
    runs = {seed: dense(seed, 16 + seed % 5) for seed in range(60, 64)}
    for method in (whole, first):
        replayed(Engine(executor.model, method), runs[60], "r60")
    state = first.state()
    second.load_state(State(json.loads(json.dumps(state.meta)), state.entries))
    engines = [Engine(executor.model, method) for method in (whole, second)]
    for seed in (61, 62, 63):
        expected, got = (replayed(engine, runs[seed], f"r{seed}") for engine in engines)
        for node in expected:
            assert torch.equal(got[node].first_logits, expected[node].first_logits)
            assert got[node].decisions == expected[node].decisions
    assert second.state().meta == whole.state().meta
    with pytest.raises(ValueError, match="not a state of graphflow"):
        GraphFlow().load_state(State())


def test_entries_are_never_rewritten_under_the_same_name(executor: Executor, dense: Dense) -> None:
    method, seen = GraphFlow(n_cal=2), dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]()
    for seed in (60, 61, 62):
        replayed(Engine(executor.model, method), dense(seed), f"r{seed}")
        for name, entry in method.state().entries.items():
            copy = {key: tensor.clone() for key, tensor in entry.items()}
            seen.setdefault(name, (entry, copy))
            assert all(torch.equal(seen[name][1][key], entry[key]) for key in entry)
    assert len(seen) == 2 * RELATIONS
    # Nor does a later version change the tensors of one that a checkpoint may be writing.
    for entry, copy in seen.values():
        assert all(torch.equal(copy[key], entry[key]) for key in entry)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_cal": 0}, "n_cal"),
        ({"dense_share": 1.1}, "dense_share"),
        ({"dense_share": -0.1}, "dense_share"),
        ({"sparsity": 2}, "sparsity"),
        ({"dense_relations": "out0>A1"}, "dense_relations"),
        ({"dense_relations": ("out0",)}, "dense_relations"),
        ({"first_turn": "cold"}, "first_turn"),
        ({"reference": "never"}, "reference"),
    ],
)
def test_illegal_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GraphFlow(**settings)
