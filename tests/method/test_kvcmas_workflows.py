"""KVCMAS in workflows: what it learns, chains, keeps and restores (paper section 3, A.3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch

from baselines.kvcomm import KVComm
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import Origin
from kvcmas.engine.contract import Held, Plan, Sources, State, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine
from kvcmas.method.kvcmas import KVCMAS
from kvcmas.pool.anchors import BASE, Anchor
from kvcmas.pool.lowrank import FactorPair, flat
from tests.replay import WORKFLOW, Truth, error, reasons, replayed
from tests.workflows import random_ids

LAYERS = 4  # of the tiny models


def warmed(
    model: TransformersAdapter, method: KVCMAS, truths: Sequence[Truth], force: bool = False
) -> Engine:
    """An engine whose pool holds all but the last request."""
    engine = Engine(model, method)
    for n, truth in enumerate(truths[:-1]):
        replayed(engine, truth, f"w{n}", force=force)
    return engine


def anchor_of(method: KVCMAS, slot: str, request: str) -> Anchor[FactorPair]:
    anchor = method.pool.anchor(slot, request)
    assert anchor is not None
    return anchor


def test_the_first_request_is_dense_and_fills_the_pool(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    method, truth = KVCMAS(), truths[-1]
    results = replayed(Engine(model, method), truth, "r")
    assert error(results, truth) < 1e-4
    decisions = [(d.segment, d.reason) for r in results.values() for d in r.decisions]
    assert decisions[:3] == [(1, "first"), (1, "cold"), (3, "cold")]
    assert {reason for _, reason in decisions[1:]} == {"cold"}
    # Later dense edges of the same request extend its anchor.
    edges = ["A0>A1", "A1>A2", "A2>A3"]
    assert set(anchor_of(method, "q", "r").parts) == {*edges, *(f"{BASE}:{e}" for e in edges)}
    assert set(anchor_of(method, "out1", "r").parts) == {
        "A1>A2",
        "A2>A3",
        *(f"{BASE}:{e}" for e in ("A1>A2", "A2>A3")),
    }
    assert len(method.pool) == 4
    assert method.pool.nbytes == method.state().nbytes
    assert all(all(anchor.exact.values()) for _, anchor in method.pool)
    assert anchor_of(method, "q", "r").length == len(truth["A0"].prompt.segments[1])


def test_learned_factors_are_those_of_source_and_observed_delta(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    method, truth = KVCMAS(rank_base=None, rank_delta=None), truths[-1]
    replayed(Engine(model, method), truth, "r", nodes=2)
    run = Executor(model).run
    caches = []
    for node in ("A0", "A1"):
        prompt = truth[node].prompt
        caches.append(run(prompt, Plan.make(prompt)).buffer.extract(prompt.rows(1)))
    parts = anchor_of(method, "q", "r").parts
    for which in "kv":
        source, target = (flat(getattr(cache, which)) for cache in caches)
        base, delta = (getattr(parts[name], which) for name in (f"{BASE}:A0>A1", "A0>A1"))
        for layer in range(LAYERS):
            torch.testing.assert_close(base.matrix(layer), source[layer], atol=1e-4, rtol=0)
        for layer in range(1, LAYERS):
            expected = (target - source)[layer]
            torch.testing.assert_close(delta.matrix(layer - 1), expected, atol=1e-4, rtol=0)


def test_base_and_delta_have_their_own_ranks(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    method = KVCMAS(rank_base=3, rank_delta=5)
    replayed(Engine(model, method), truths[-1], "r", nodes=2)
    parts = anchor_of(method, "q", "r").parts
    width = model.spec.kv_heads * model.spec.head_dim
    for part, layers, rank in (
        (parts[f"{BASE}:A0>A1"], LAYERS, 3),
        (parts["A0>A1"], LAYERS - 1, 5),
    ):
        assert part.k.b.shape == part.v.b.shape == (layers, rank, width)


def test_shared_base(model: TransformersAdapter, truths: list[Truth]) -> None:
    per_edge, shared = KVCMAS(tau=1), KVCMAS(tau=1, base="shared")
    served = []
    for method in (per_edge, shared):
        engine = warmed(model, method, truths)
        parts = anchor_of(method, "q", "w0").parts
        assert sum(name.startswith(BASE) for name in parts) == (3 if method is per_edge else 1)
        served.append(replayed(engine, truths[-1], "r"))
    assert shared.pool.nbytes < per_edge.pool.nbytes
    # The first edge has the same base in both; a later one is matched with the first one's.
    assert torch.equal(served[0]["A1"].first_logits, served[1]["A1"].first_logits)
    assert not torch.equal(served[0]["A2"].first_logits, served[1]["A2"].first_logits)


def test_shared_base_survives_a_slot_that_a_prompt_names_twice(model: TransformersAdapter) -> None:
    method = KVCMAS(tau=1, base="shared")
    engine, q = Engine(model, method), random_ids(1, 9)
    for request in ("a", "b", "c"):
        session = engine.session(WORKFLOW, request)
        for node in WORKFLOW.nodes[:2]:
            prompt = Prompt(
                (pf(random_ids(node.agent, 6)), ph("q", q), pf([9]), ph("q", q), pf([8]))
            )
            result = session.run(node, prompt, max_new_tokens=0)
    assert [d.action for d in result.decisions] == ["correct", "correct"]


def test_accepted_corrections_are_never_inserted(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    method = KVCMAS(tau=1)
    engine = warmed(model, method, truths)
    before = method.pool.state().meta["slots"]
    results = replayed(engine, truths[-1], "r")
    assert reasons(results) == {"first", "accepted"}
    assert all(anchor.request != "r" for _, anchor in method.pool)
    # Only the use counts moved.
    after = method.pool.state().meta["slots"]
    uses = [a.pop("uses") for slots in (before, after) for s in slots.values() for a in s]
    assert before == after
    assert sum(uses[: len(uses) // 2]) == 0 < sum(uses[len(uses) // 2 :])


def test_a_dense_edge_after_a_corrected_one_is_marked_inexact(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    method = KVCMAS(tau=1)
    engine = warmed(model, method, truths)
    force = {("A1", 1): True, ("A1", 3): False, ("A2", 1): False}
    replayed(engine, truths[-1], "r", force, nodes=3)
    assert anchor_of(method, "out0", "r").exact == {"A0>A1": False, f"{BASE}:A0>A1": False}
    # At A2 nothing approximate precedes the query: dense resets the chain.
    assert set(anchor_of(method, "q", "r").exact.values()) == {True}


@dataclass(frozen=True)
class Recorder(KVCMAS):
    """KVCMAS that keeps what it was given and what it planned, by node name."""

    name: ClassVar[str] = "recorder"

    seen: dict[str, tuple[Plan, dict[int, Held | None]]] = field(default_factory=dict)

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        plan = super().plan(turn, sources)
        self.seen[turn.node] = (plan, {i: sources.held(i) for i in turn.prompt.shared()})
        return plan


def test_the_materialised_cache_is_the_next_source(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    method = Recorder(tau=1)
    replayed(warmed(model, method, truths), truths[-1], "r")
    (fill, *_), first = method.seen["A1"][0].fills, method.seen["A1"][1][1]
    second = method.seen["A2"][1][1]
    assert first is not None and second is not None
    assert (first.node, first.exact) == ("A0", True)
    assert (second.node, second.exact) == ("A1", False)
    assert fill.correction is not None
    k, v = first.cache.k.clone(), first.cache.v.clone()
    for layer in range(1, LAYERS):
        fill.correction.apply(layer, k[layer], v[layer])
    torch.testing.assert_close(second.cache.k, k, atol=1e-4, rtol=0)
    torch.testing.assert_close(second.cache.v, v, atol=1e-5, rtol=0)
    assert float((second.cache.v - first.cache.v).abs().max()) > 1e-2
    edges = [d.edge for d in method.seen["A2"][0].decisions]
    assert [(e.source, e.target) for e in edges if e] == [("A1", "A2"), ("A1", "A2"), ("A1", "A2")]


def test_layer_0_is_never_corrected(model: TransformersAdapter, truths: list[Truth]) -> None:
    method = Recorder(tau=1)
    engine = warmed(model, method, truths)
    replayed(engine, truths[-1], "r")
    prompt, (plan, _) = truths[-1]["A2"].prompt, method.seen["A2"]
    assert len(plan.fills) == 3
    got, dense = (engine.executor.run(prompt, p).buffer for p in (plan, Plan.make(prompt)))
    for i in prompt.shared():
        rows = prompt.rows(i)
        part = got.origin[:, rows.start : rows.stop]
        assert bool((part[0] == Origin.REUSED).all())
        assert bool((part[1:] == Origin.CORRECTED).all())
    torch.testing.assert_close(got.k[0], dense.k[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(got.v[0], dense.v[0], atol=2e-5, rtol=0)
    assert not torch.allclose(got.v[1], dense.v[1], atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chained": False},
        {"base": "shared"},
        {"weights": "uniform"},
        {"weights": "nearest_anchor"},
        {"coverage": "per_token"},
        {"capacity_rule": "authors", "top_p_quirk": True},
    ],
    ids=str,
)
def test_identical_anchors_give_the_exact_delta(
    model: TransformersAdapter, truths: list[Truth], settings: dict[str, Any]
) -> None:
    method = KVCMAS(tau=1, rank_base=None, rank_delta=None, **settings)
    engine, truth = Engine(model, method), truths[-1]
    for request in ("w0", "w1"):
        replayed(engine, truth, request, force=False)
    results = replayed(engine, truth, "r")
    assert reasons(results) == {"accepted"} | ({"first"} if method.chained else set())
    for node, result in results.items():
        expected = truth[node].first_logits
        torch.testing.assert_close(result.first_logits, expected, atol=1e-3, rtol=0)


def test_token_knn_with_its_own_tokens_in_the_pool_is_exact(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    settings: dict[str, Any] = {"rank_base": None, "rank_delta": None, "weights": "token_knn"}
    engine = Engine(model, KVCMAS(tau=1, neighbours=1, **settings))
    for n, truth in enumerate(truths):
        replayed(engine, truth, f"w{n}", force=False)
    assert error(replayed(engine, truths[-1], "r"), truths[-1]) < 1e-3


def test_the_gate_prefers_the_same_request_over_others(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    """A peaked score is accepted at a small tau, a pool of strangers is not."""
    strangers = warmed(model, KVCMAS(tau=0.01), truths)
    known = warmed(model, KVCMAS(tau=0.01), [*truths, truths[-1]])
    refused = replayed(strangers, truths[-1], "r")["A1"].decisions
    accepted = replayed(known, truths[-1], "r")["A1"].decisions
    assert all(d.entropy is not None for d in (*refused, *accepted))
    assert accepted[0].reason == "accepted"
    assert (accepted[0].entropy or 0) <= (refused[0].entropy or 0)


def test_non_chained_corrects_the_first_agent_from_the_reference(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    method = KVCMAS(tau=1, chained=False)
    engine = warmed(model, method, truths)
    assert set(anchor_of(method, "q", "w0").parts) == {
        *(f"ref>A{n}" for n in range(4)),
        *(f"{BASE}:ref>A{n}" for n in range(4)),
    }
    results = replayed(engine, truths[-1], "r")
    assert [d.action for d in results["A0"].decisions] == ["correct"]
    charged = [r.accounting.reference_tokens for r in results.values()]
    assert charged == [len(truths[-1]["A0"].prompt.segments[1]), 8, 8, 8]
    background = KVCMAS(tau=1, chained=False, reference="background", first_turn="dense")
    results = replayed(warmed(model, background, truths), truths[-1], "r")
    assert [d.reason for d in results["A0"].decisions] == ["first"]
    assert [r.accounting.reference_tokens for r in results.values()] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "method",
    [
        KVCMAS(tau=0.6, capacity=2),
        KVCMAS(tau=0.6, capacity=2, base="shared", capacity_rule="authors"),
        KVCMAS(tau=1, capacity=2, chained=False),
        KVCMAS(tau=0.6, rank_base=4, rank_delta=4, factorisation="randomised", svd_seed=3),
    ],
    ids=["per_edge", "shared", "non_chained", "randomised"],
)
def test_state_round_trip_continues_like_an_uninterrupted_run(
    model: TransformersAdapter, truths: list[Truth], method: KVCMAS
) -> None:
    whole, first, second = (Engine(model, replace(method)) for _ in range(3))
    for n in (0, 1):
        for engine in (whole, first):
            replayed(engine, truths[n], f"w{n}", force=False)
    state = first.state()
    second.load_state(State(json.loads(json.dumps(state.meta)), state.entries))
    for n, request in ((2, "w2"), (3, "r"), (0, "again")):
        expected, got = (replayed(engine, truths[n], request) for engine in (whole, second))
        for node in expected:
            assert torch.equal(got[node].first_logits, expected[node].first_logits)
            assert got[node].decisions == expected[node].decisions
    assert second.state().meta == whole.state().meta
    for name, entry in whole.state().entries.items():
        assert all(torch.equal(second.state().entries[name][key], entry[key]) for key in entry)
    with pytest.raises(ValueError, match="not a state of kvcmas"):
        KVCMAS().load_state(KVComm().state())


def test_randomised_factorisation_leaves_the_global_generator_alone(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    pools = []
    for seed in (1, 1, 2):
        method = KVCMAS(factorisation="randomised", rank_delta=4, svd_seed=seed)
        torch.manual_seed(len(pools))
        before = torch.get_rng_state()
        replayed(Engine(model, method), truths[0], "r", nodes=2)
        assert torch.equal(torch.get_rng_state(), before)
        pools.append(anchor_of(method, "q", "r").parts["A0>A1"].k.b)
    assert torch.equal(pools[0], pools[1])
    assert not torch.equal(pools[0], pools[2])


@pytest.mark.parametrize("rule", ["strict", "authors"])
def test_capacity_is_per_slot(model: TransformersAdapter, truths: list[Truth], rule: Any) -> None:
    method = KVCMAS(tau=0, capacity=2, capacity_rule=rule)
    engine = Engine(model, method)
    for n, truth in enumerate(truths):
        replayed(engine, truth, f"w{n}", force=False)
    held: dict[str, list[str]] = {}
    for slot, anchor in method.pool:
        held.setdefault(slot, []).append(anchor.request)
    kept = ["w2", "w3"] if rule == "strict" else ["w1", "w2", "w3"]
    assert held == dict.fromkeys(("q", "out0", "out1", "out2"), kept)
