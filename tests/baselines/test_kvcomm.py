"""KVComm against oracle tensors, against a NumPy reference, and in workflows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from baselines.fullrank import Pair, WeightedDeltas
from baselines.kvcomm import KVComm
from kvcmas.engine.cache import Buffer, Origin, SegmentCache
from kvcmas.engine.contract import Correction, Decision, Fill, Plan, State, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine
from kvcmas.engine.workflow import fully_connected
from kvcmas.errors import UserError
from kvcmas.pool.anchors import BASE
from tests import reference
from tests.reference import CASES, Case, RefAnchor
from tests.replay import WORKFLOW, Truth, dense, replayed
from tests.workflows import FixedSources, random_ids

SLOT, EDGE = "q", "ref>A1"


def float32(x: reference.Array) -> Tensor:
    return torch.from_numpy(x).float()


@dataclass(frozen=True)
class Lab:
    """One PH in front of a method whose pool was filled by hand; no model involved."""

    method: KVComm
    cache: SegmentCache

    def turn(self, force: Mapping[int, bool]) -> Turn:
        prompt = Prompt((pf([1, 2]), ph(SLOT, [3] * len(self.cache)), pf([4])))
        return Turn("new", "A1", 1, prompt, force)

    def plan(self, **force: bool) -> tuple[Turn, Plan]:
        turn = self.turn({1: force["force"]} if force else {})
        return turn, self.method.plan(turn, FixedSources(references={1: self.cache}))

    def decision(self) -> Decision:
        return self.plan()[1].decisions[0]

    def corrected(self) -> tuple[Tensor, Tensor]:
        """K and V after the correction, whatever the gate says."""
        fills = self.plan(force=True)[1].fills
        return corrected(self.cache, fills[0].correction if fills else None)

    def counts(self) -> list[int]:
        """Use counts that one turn adds."""
        turn, plan = self.plan()
        before = [anchor.uses for _, anchor in self.method.pool]
        # Without its decisions the plan leaves nothing to learn, so no buffer is looked at.
        accepted, buffer = replace(plan, decisions=()), cast(Buffer, None)
        self.method.after_first_token(turn, FixedSources(), accepted, buffer)
        return [a.uses - b for (_, a), b in zip(self.method.pool, before, strict=True)]


def corrected(cache: SegmentCache, correction: Correction | None) -> tuple[Tensor, Tensor]:
    """The cache with a correction applied as the executor does: layer 0 is left alone."""
    k, v = cache.k.clone(), cache.v.clone()
    if correction is not None:
        for layer in range(1, len(k)):
            correction.apply(layer, k[layer, :, : correction.rows], v[layer, :, : correction.rows])
    return k, v


def lab(method: KVComm, cache: SegmentCache, anchors: Sequence[tuple[Pair, Pair]]) -> Lab:
    for n, (base, delta) in enumerate(anchors):
        parts = {BASE: base, EDGE: Pair(delta.k[1:], delta.v[1:])}
        method.pool.insert(SLOT, f"r{n}", len(base), parts, exact=True)
    return Lab(method, cache)


def lab_of(case: Case, method: KVComm) -> Lab:
    def pairs(a: RefAnchor) -> tuple[Pair, Pair]:
        return (
            Pair(float32(a.base_k), float32(a.base_v)),
            Pair(float32(a.delta_k), float32(a.delta_v)),
        )

    cache = SegmentCache(float32(case.k), float32(case.v))
    return lab(method, cache, [pairs(anchor) for anchor in case.anchors])


def golden(shared: Path) -> list[tuple[dict[str, Any], Lab, Tensor, Tensor]]:
    """Cases of the public implementation: facts, the same case here, corrected K and V."""
    folder = shared / "golden"
    if not folder.is_dir():
        pytest.skip("no oracle tensors there")
    tensors = {
        name: tensor.squeeze(1)
        for name, tensor in load_file(folder / "kvcomm_interpolation.safetensors").items()
    }
    cases = []
    for i, facts in enumerate(json.loads((folder / "kvcomm_interpolation.json").read_text())):
        anchors = []
        for n in range(len(facts["lens"])):
            k, v = (f"{i}.anchor{n}.ph_{kind}" for kind in ("key", "value"))
            anchors.append(
                (
                    Pair(tensors[f"{k}_embedding"], tensors[f"{v}_embedding"]),
                    Pair(tensors[f"{k}_delta"], tensors[f"{v}_delta"]),
                )
            )
        cache = SegmentCache(tensors[f"{i}.base_k"], tensors[f"{i}.base_v"])
        it = lab(KVComm(gamma=facts["threshold"]), cache, anchors)
        cases.append((facts, it, tensors[f"{i}.out_k"], tensors[f"{i}.out_v"]))
    return cases


def test_oracle_verdicts_counts_and_tensors(shared: Path) -> None:
    cases = golden(shared)
    assert len(cases) == 8
    for facts, it, k, v in cases:
        assert (it.decision().action == "dense") == facts["needs_dense"], facts
        assert it.counts() == facts["activated"], facts
        got_k, got_v = it.corrected()
        torch.testing.assert_close(got_k, k, atol=1e-5, rtol=0)
        torch.testing.assert_close(got_v, v, atol=1e-5, rtol=0)
        assert torch.equal(got_k[0], it.cache.k[0])


def test_the_numpy_reference_agrees_with_the_oracle(shared: Path) -> None:
    """The reference is only worth something if it was right about the public implementation."""
    for facts, it, k, v in golden(shared):
        anchors = [
            RefAnchor(
                *(
                    np.concatenate([np.zeros((skip, *x.shape[1:])), x.numpy().astype(float)])
                    for x, skip in (
                        (anchor.parts[BASE].k, 0),
                        (anchor.parts[BASE].v, 0),
                        (anchor.parts[EDGE].k, 1),
                        (anchor.parts[EDGE].v, 1),
                    )
                )
            )
            for _, anchor in it.method.pool
        ]
        k_in, v_in = it.cache.k.numpy().astype(float), it.cache.v.numpy().astype(float)
        outcome = reference.kvcomm(Case("", k_in, v_in, tuple(anchors), facts["threshold"]))
        assert outcome.dense == facts["needs_dense"]
        assert outcome.counts == facts["activated"]
        np.testing.assert_allclose(outcome.k, k.numpy(), atol=1e-5)
        np.testing.assert_allclose(outcome.v, v.numpy(), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numpy_reference(case: Case) -> None:
    expected = reference.kvcomm(case)
    it = lab_of(case, KVComm(gamma=case.threshold))
    decision = it.decision()
    assert (decision.action == "dense") == expected.dense
    assert decision.entropy == pytest.approx(expected.entropy, abs=1e-5)
    assert it.counts() == expected.counts
    k, v = it.corrected()
    torch.testing.assert_close(k, float32(expected.k), atol=1e-5, rtol=0)
    torch.testing.assert_close(v, float32(expected.v), atol=1e-5, rtol=0)


def test_cases_reach_every_outcome() -> None:
    outcomes = [reference.kvcomm(case) for case in CASES]
    assert {outcome.dense for outcome in outcomes} == {True, False}
    assert {sum(o.counts) for o in outcomes if not o.dense} >= {1, 2, 3}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no anchor", "cold"),
        ("one anchor", "cold"),
        ("only one is long enough", "length"),
        ("none is long enough", "length"),
        ("flat scores", "entropy"),
        ("its own anchor", "accepted"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert lab_of(case, KVComm(gamma=case.threshold)).decision().reason == reason


def test_a_pool_of_one_bypasses_the_gate() -> None:
    (case,) = (case for case in CASES if case.name == "one anchor")
    decision = lab_of(case, KVComm(capacity=1)).decision()
    assert (decision.action, decision.entropy) == ("correct", None)


def test_counts_without_the_quirk() -> None:
    (case,) = (case for case in CASES if case.name == "its own anchor")
    assert lab_of(case, KVComm()).counts() == [1, 1, 1]
    assert lab_of(case, KVComm(top_p_quirk=False)).counts() == [1, 0, 0]


def test_anchors_of_other_consumers_do_not_count() -> None:
    (case,) = (case for case in CASES if case.name == "equal lengths")
    it = lab_of(case, KVComm(gamma=1))
    assert it.decision().action == "correct"
    other = replace(it.turn({}), node="A2")
    plan = it.method.plan(other, FixedSources(references={1: it.cache}))
    assert plan.decisions[0].reason == "cold"


def test_correction_of_a_long_segment_in_bf16() -> None:
    (case,) = [reference.make_case("long", 20, 1100, [1100, 1200], dim=2)]
    expected = reference.kvcomm(case)
    it = lab_of(case, KVComm(gamma=1))
    k, v = it.corrected()
    torch.testing.assert_close(v, float32(expected.v), atol=1e-5, rtol=0)
    cache = SegmentCache(it.cache.k.bfloat16(), it.cache.v.bfloat16())
    low_k, _ = Lab(it.method, cache).corrected()
    assert low_k.dtype == torch.bfloat16
    torch.testing.assert_close(low_k.float(), k, atol=0.1, rtol=0.02)


# Workflows on the tiny models.


@pytest.fixture(scope="module")
def truth(executor: Executor) -> Truth:
    """Dense results of the request that is served."""
    return dense(executor.model, 5)


@pytest.mark.parametrize("method", [KVComm(gamma=1), KVComm.faithful()], ids=["", "faithful"])
def test_same_request_in_the_pool_twice_is_exact(
    method: KVComm, executor: Executor, truth: Truth
) -> None:
    """All deltas are equal, so the weights do not matter; the first agent is corrected as well."""
    engine = Engine(executor.model, replace(method, gamma=1))
    for request in ("warm0", "warm1"):
        replayed(engine, truth, request)
    results = replayed(engine, truth, "r")
    for node, result in results.items():
        assert {d.reason for d in result.decisions} == {"accepted"}
        expected = truth[node].first_logits
        torch.testing.assert_close(result.first_logits, expected, atol=1e-3, rtol=0)
        assert all(e.corrected == 3 * e.total // 4 for e in result.accounting.shared.values())


def test_other_requests_in_the_pool_are_not_exact_and_reuse_bites(
    executor: Executor, truth: Truth
) -> None:
    engine = Engine(executor.model, KVComm(gamma=1))
    for n in range(2):
        replayed(engine, dense(executor.model, 50 + n), f"w{n}")
    results = replayed(engine, truth, "r")
    assert all(d.action == "correct" for r in results.values() for d in r.decisions)
    difference = (results["A3"].first_logits - truth["A3"].first_logits).abs().max()
    assert float(difference) > 1e-2


def test_pool_after_a_cold_request(executor: Executor, truth: Truth) -> None:
    method = KVComm()
    replayed(Engine(executor.model, method), truth, "r")
    held = {slot: anchor for slot, anchor in method.pool}
    assert set(held) == {"q", "out0", "out1", "out2"}
    assert set(held["q"].parts) == {BASE, "ref>A0", "ref>A1", "ref>A2", "ref>A3"}
    assert set(held["out2"].parts) == {BASE, "ref>A3"}
    assert all(all(anchor.exact.values()) for anchor in held.values())
    base = held["q"].parts[BASE]
    assert held["q"].serials[BASE] == held["q"].serials["ref>A0"] + 1  # stored once
    assert held["q"].parts["ref>A1"].nbytes == base.nbytes * 3 // 4
    assert method.pool.nbytes == method.state().nbytes
    assert len(base) == len(truth["A1"].prompt.segments[1])


def test_accepted_corrections_are_not_inserted_and_pollution_is_marked(
    executor: Executor, truth: Truth
) -> None:
    method = KVComm(gamma=1)
    engine = Engine(executor.model, method)
    for request in ("warm0", "warm1"):
        replayed(engine, truth, request)
    results = replayed(engine, truth, "r", {("A1", 1): True, ("A1", 3): False}, nodes=2)
    assert [d.action for d in results["A1"].decisions] == ["correct", "dense"]
    assert method.pool.anchor("q", "r") is None
    anchor = method.pool.anchor("out0", "r")
    assert anchor is not None
    assert anchor.exact == {BASE: False, "ref>A1": False}


@pytest.mark.parametrize("reference_", ["on_path", "background"])
def test_reference_prefill_is_charged_to_the_first_consumer(
    reference_: Literal["on_path", "background"],
    executor: Executor,
    truth: Truth,
) -> None:
    engine = Engine(executor.model, KVComm(reference=reference_), reference_prefix=(0,))
    results = replayed(engine, truth, "r")
    charged = [result.accounting.reference_tokens for result in results.values()]
    lengths = [20, *(len(truth[f"A{n}"].output) for n in range(3))]
    assert charged == ([n + 1 for n in lengths] if reference_ == "on_path" else [0] * 4)


def test_first_turn_dense(executor: Executor, truth: Truth) -> None:
    method = KVComm(gamma=1, first_turn="dense")
    engine = Engine(executor.model, method)
    for request in ("warm0", "warm1", "r"):
        results = replayed(engine, truth, request)
    assert torch.equal(results["A0"].first_logits, truth["A0"].first_logits)
    assert [d.reason for d in results["A0"].decisions] == ["first"]
    assert {d.reason for d in results["A1"].decisions} == {"accepted"}
    assert all("ref>A0" not in anchor.parts for _, anchor in method.pool)


def test_a_shift_of_the_prompt_leaves_canonical_deltas_alone(executor: Executor) -> None:
    """Another position is another rotation and nothing else, in the pool and when applied."""
    q = random_ids(1, 16)
    deltas, served = [], []
    for offset in (0, 40):
        method = KVComm(capacity=1)
        engine = Engine(executor.model, method)
        for request in ("warm", "r"):
            session = engine.session(fully_connected(1), request)
            # The first rows are no context for the others: what moves is the position alone.
            turn = Prompt((ph("q", q), pf(random_ids(3, 3))))
            session.run(fully_connected(1).nodes[0], turn, max_new_tokens=0)
        ((_, anchor),) = method.pool
        pair = anchor.parts["ref>A0"]
        fill = Fill(1, SegmentCache(anchor.parts[BASE].k, anchor.parts[BASE].v))
        weights = torch.ones(1, len(q))
        correction = WeightedDeltas(len(q), weights, weights, [pair])
        prompt = Prompt((pf(random_ids(9, 5 + offset)), ph("q", q), pf([7])))
        run = executor.run(prompt, Plan.make(prompt, (replace(fill, correction=correction),)))
        served.append(run.buffer.extract(prompt.rows(1)))
        deltas.append(pair)
    torch.testing.assert_close(deltas[0].k, deltas[1].k)
    torch.testing.assert_close(served[0].k, served[1].k, atol=2e-5, rtol=0)
    torch.testing.assert_close(served[0].v, served[1].v, atol=2e-5, rtol=0)


def test_state_round_trip_continues_like_an_uninterrupted_run(
    executor: Executor, truth: Truth
) -> None:
    whole, first, second = (
        Engine(executor.model, replace(KVComm.faithful(), capacity=2, gamma=0.6)) for _ in range(3)
    )
    others = [dense(executor.model, 60 + n) for n in range(4)]
    for n in range(3):
        for engine in (whole, first):
            replayed(engine, others[n], f"w{n}")
    state = first.state()
    second.load_state(State(json.loads(json.dumps(state.meta)), state.entries))
    for request, other in (("w3", others[3]), ("r", truth)):
        expected, got = replayed(whole, other, request), replayed(second, other, request)
        for node in expected:
            assert torch.equal(got[node].first_logits, expected[node].first_logits)
            assert got[node].decisions == expected[node].decisions
    assert second.state().meta == whole.state().meta
    with pytest.raises(ValueError, match="not a state of kvcomm"):
        KVComm().load_state(State())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": -1}, "gamma"),
        ({"capacity": 0}, "capacity"),
        ({"window": 0}, "window"),
        ({"temperature": 0}, "temperature"),
        ({"in_flight": 0}, "in_flight"),
        ({"capacity_rule": "loose"}, "capacity_rule"),
        ({"gate_scope": "agent"}, "gate_scope"),
        ({"base": "chained"}, "base"),
        ({"prefixes": "offset"}, "gate_scope='prompt'"),
        ({"prefixes": "offset", "gate_scope": "prompt", "pf_policy": "rotate"}, "pf_policy"),
        ({"first_turn": "cold"}, "first_turn"),
        ({"reference": "never"}, "reference"),
    ],
)
def test_illegal_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KVComm(**settings)


def test_layer_0_and_uncovered_entries_are_reused_as_they_are(
    executor: Executor, truth: Truth
) -> None:
    method = KVComm(gamma=1)
    engine = Engine(executor.model, method)
    for request in ("warm0", "warm1"):
        replayed(engine, truth, request)
    prompt = truth["A0"].prompt
    reference_ = engine.session(WORKFLOW, "r").reference("q", prompt.segments[1].ids)[0]
    turn = Turn("r", "A0", 0, prompt)
    plan = method.plan(turn, FixedSources(references={1: reference_}))
    run = executor.run(prompt, plan)
    exact = executor.run(prompt, Plan.make(prompt))
    rows = prompt.rows(1)
    assert set(run.buffer.origin[0, rows.start : rows.stop].tolist()) == {Origin.REUSED}
    torch.testing.assert_close(run.buffer.k[0], exact.buffer.k[0], atol=2e-5, rtol=0)
