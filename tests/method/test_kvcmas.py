"""KVCMAS on one PH in front of a pool filled by hand (DESIGN section 6; paper A.3, C.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.fullrank import Pair, WeightedDeltas
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Correction, Decision, Held, Plan, Turn
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.errors import UserError
from kvcmas.method.kvcmas import KVCMAS
from kvcmas.pool.anchors import BASE
from kvcmas.pool.lowrank import FactorPair, factorise, flat, token_distances
from tests import reference
from tests.reference import CASES, Array, Case
from tests.workflows import FixedSources

SLOT, EDGE = "q", "A0>A1"


def float32(x: Array) -> Tensor:
    return torch.from_numpy(x).float()


def pair(k: Array, v: Array, rank: int | None) -> FactorPair:
    return FactorPair(factorise(flat(float32(k)), rank), factorise(flat(float32(v)), rank))


@dataclass(frozen=True)
class Lab:
    """A case of the reference in front of a method."""

    method: KVCMAS
    case: Case

    def __post_init__(self) -> None:
        base = BASE if self.method.base == "shared" else f"{BASE}:{EDGE}"
        for n, a in enumerate(self.case.anchors):
            parts = {
                base: pair(a.base_k, a.base_v, self.method.rank_base),
                EDGE: pair(a.delta_k[1:], a.delta_v[1:], self.method.rank_delta),
            }
            self.method.pool.insert(SLOT, f"r{n}", a.length, parts, exact=True)

    @property
    def cache(self) -> SegmentCache:
        return SegmentCache(float32(self.case.k), float32(self.case.v))

    def plan(self, force: Mapping[int, bool] | None = None, node: str = "A1") -> Plan:
        prompt = Prompt((pf([1, 2]), ph(SLOT, [3] * self.case.length), pf([4])))
        turn = Turn("new", node, 1, prompt, force or {})
        return self.method.plan(turn, FixedSources({1: Held(self.cache, "A0", True)}))

    def decision(self) -> Decision:
        return self.plan().decisions[0]

    def corrected(self) -> tuple[Tensor, Tensor]:
        """K and V after the correction, whatever the gate says."""
        fills = self.plan({1: True}).fills
        return corrected(self.cache, fills[0].correction if fills else None)


def corrected(cache: SegmentCache, correction: Correction | None) -> tuple[Tensor, Tensor]:
    k, v = cache.k.clone(), cache.v.clone()
    if correction is not None:
        for layer in range(1, len(k)):
            correction.apply(layer, k[layer, :, : correction.rows], v[layer, :, : correction.rows])
    return k, v


def case(name: str) -> Case:
    (found,) = (case for case in CASES if case.name == name)
    return found


@pytest.mark.parametrize("ranks", [(None, None), (2, 2), (1, 5)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numpy_reference(case: Case, ranks: tuple[int | None, int | None]) -> None:
    expected = reference.kvcmas(case, *ranks)
    method = KVCMAS(tau=case.threshold, rank_base=ranks[0], rank_delta=ranks[1])
    lab = Lab(method, case)
    plan = lab.plan()
    assert (plan.decisions[0].action == "dense") == expected.dense
    assert plan.decisions[0].entropy == pytest.approx(expected.entropy, abs=1e-4)
    used = plan.fills[0].correction.used if plan.fills else ()
    assert [int(f"r{n}" in used) for n in range(len(case.anchors))] == expected.counts
    for got, want in zip(lab.corrected(), (expected.k, expected.v), strict=True):
        torch.testing.assert_close(got, float32(want), atol=2e-5, rtol=0)
        assert torch.equal(got[0], float32(want)[0])


def test_cases_reach_every_outcome() -> None:
    outcomes = [reference.kvcmas(case, 2, 2) for case in CASES]
    assert {outcome.dense for outcome in outcomes} == {True, False}
    covered = [min(c.length, max((a.length for a in c.anchors), default=0)) for c in CASES]
    assert any(0 < rows < c.length for rows, c in zip(covered, CASES, strict=True))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no anchor", "cold"),
        ("one anchor", "cold"),
        ("only one is long enough", "entropy"),
        ("flat scores", "entropy"),
        ("its own anchor", "accepted"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    it = replace(case(name), threshold=0.05)
    assert Lab(KVCMAS(tau=it.threshold), it).decision().reason == reason


def test_rows_past_the_longest_anchor_keep_the_source() -> None:
    lab = Lab(KVCMAS(), case("none is long enough"))  # 12 tokens, anchors of 4, 9, 6
    fill = lab.plan({1: True}).fills[0]
    assert fill.correction is not None
    assert fill.correction.rows == 9
    k, _ = lab.corrected()
    assert torch.equal(k[:, :, 9:], lab.cache.k[:, :, 9:])
    only_the_longest = float32(lab.case.k + 0)
    only_the_longest[1:, :, :9] += float32(lab.case.anchors[1].delta_k)[1:]
    torch.testing.assert_close(k, only_the_longest, atol=2e-5, rtol=0)


def test_per_token_coverage_uses_every_anchor_that_reaches_a_token() -> None:
    it = case("none is long enough")
    lab = Lab(KVCMAS(coverage="per_token", rank_base=None, rank_delta=None), it)
    k, _ = lab.corrected()
    expected = it.k.copy()
    for token in range(9):
        anchors = [a for a in it.anchors if a.length > token]
        weights = reference.token_weights(
            it.k[:, :, token : token + 1], [a.base_k[:, :, token : token + 1] for a in anchors]
        )
        for weight, anchor in zip(weights[:, 0], anchors, strict=True):
            expected[1:, :, token] += weight * anchor.delta_k[1:, :, token]
    torch.testing.assert_close(k, float32(expected), atol=2e-5, rtol=0)


@pytest.mark.parametrize("rule", ["strict", "authors"])
def test_a_pool_of_one_bypasses_the_gate(rule: Any) -> None:
    method = KVCMAS(tau=0, capacity=1, capacity_rule=rule)
    assert Lab(method, case("one anchor")).decision().action == "correct"
    method = KVCMAS(tau=0, capacity=1, capacity_rule="authors")
    assert Lab(method, case("two anchors")).decision().action == "correct"
    assert Lab(KVCMAS(capacity=1), case("no anchor")).decision().reason == "cold"


def test_full_rank_reproduces_the_full_rank_correction() -> None:
    """Factors of full rank give what full tensors with the same weights give."""
    it = case("more tokens than features")
    lab = Lab(KVCMAS(rank_base=None, rank_delta=None), it)
    used = [a for a in it.anchors if a.length >= it.length]
    weights = [
        float32(reference.token_weights(x, bases))
        for x, bases in ((it.k, [a.base_k for a in used]), (it.v, [a.base_v for a in used]))
    ]
    deltas = [Pair(float32(a.delta_k[1:]), float32(a.delta_v[1:])) for a in used]
    full = corrected(lab.cache, WeightedDeltas(it.length, *weights, deltas))
    for got, want in zip(lab.corrected(), full, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_gate_and_weights_have_their_own_temperatures() -> None:
    it = case("flat scores")
    plain = Lab(KVCMAS(), it)
    gate, weights = Lab(KVCMAS(temperature=0.01), it), Lab(KVCMAS(weight_temperature=0.01), it)
    entropies = [lab.decision().entropy for lab in (plain, gate, weights)]
    assert entropies[0] == entropies[2]
    assert (entropies[1] or 0) < (entropies[0] or 0) - 0.1
    values = [lab.corrected()[1] for lab in (plain, gate, weights)]
    assert torch.equal(values[0], values[1])
    assert not torch.allclose(values[0], values[2], atol=1e-3)


def test_gate_and_weights_in_bf16_follow_the_rounded_factors() -> None:
    it = case("more tokens than features")
    lab = Lab(KVCMAS(tau=1, rank_base=3), it)

    def rounded(factors: FactorPair) -> FactorPair:
        return FactorPair(
            *(replace(f, a=f.a.bfloat16(), b=f.b.bfloat16()) for f in (factors.k, factors.v))
        )

    for _, anchor in lab.method.pool:
        anchor.parts = {name: rounded(part) for name, part in anchor.parts.items()}
    cache = SegmentCache(lab.cache.k.bfloat16(), lab.cache.v.bfloat16())
    prompt = Prompt((pf([1, 2]), ph(SLOT, [3] * it.length), pf([4])))
    sources = FixedSources({1: Held(cache, "A0", True)})
    plan = lab.method.plan(Turn("new", "A1", 1, prompt), sources)
    bases = [anchor.parts[f"{BASE}:{EDGE}"] for _, anchor in lab.method.pool]
    whole = [torch.stack([b.v.matrix(layer) for layer in range(3)])[:, : it.length] for b in bases]
    distances = torch.stack([(flat(cache.v).double() - w.double()).norm() for w in whole])
    scores = torch.softmax(-distances, dim=0)
    entropy = float(-(scores * scores.log()).sum() / torch.tensor(4.0).log())
    assert plan.decisions[0].entropy == pytest.approx(entropy, abs=1e-4)
    expected = torch.stack([(flat(cache.v).float() - w).abs().mean(dim=(0, 2)) for w in whole])
    got = token_distances(cache.v, [b.v for b in bases], it.length)
    torch.testing.assert_close(got, expected)


def test_an_anchor_without_this_edge_is_not_compatible() -> None:
    lab = Lab(KVCMAS(tau=1), case("equal lengths"))
    assert lab.plan().decisions[0].action == "correct"
    assert lab.plan(node="A2").decisions[0].reason == "cold"


def test_force() -> None:
    accepting, refusing = KVCMAS(tau=1), KVCMAS(tau=0)
    (refused,) = Lab(accepting, case("equal lengths")).plan({1: False}).decisions
    (accepted,) = Lab(refusing, case("equal lengths")).plan({1: True}).decisions
    assert (refused.action, refused.reason) == ("dense", "forced")
    assert (accepted.action, accepted.reason) == ("correct", "forced")
    (impossible,) = Lab(KVCMAS(), case("no anchor")).plan({1: True}).decisions
    assert (impossible.action, impossible.reason) == ("dense", "cold")


def test_token_knn_reaches_every_row() -> None:
    lab = Lab(KVCMAS(weights="token_knn", neighbours=2), case("none is long enough"))
    fill = lab.plan({1: True}).fills[0]
    assert fill.correction is not None
    assert fill.correction.rows == lab.case.length


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": -0.1}, "tau"),
        ({"rank_base": 0}, "rank_base"),
        ({"rank_delta": 0}, "rank_delta"),
        ({"capacity": 0}, "capacity"),
        ({"window": 0}, "window"),
        ({"temperature": 0}, "temperature"),
        ({"weight_temperature": -1}, "weight_temperature"),
        ({"capacity_rule": "loose"}, "capacity_rule"),
        ({"base": "both"}, "base"),
        ({"coverage": "some"}, "coverage"),
        ({"factorisation": "qr"}, "factorisation"),
        ({"weights": "softmax"}, "weights"),
        ({"first_turn": "dense"}, "chained=False"),
        ({"reference": "background"}, "chained=False"),
        ({"weights": "uniform", "weight_temperature": 2}, "weight_temperature"),
        ({"weights": "nearest_anchor", "weight_temperature": 2}, "weight_temperature"),
        ({"neighbours": 4}, "token_knn"),
        ({"weights": "token_knn", "neighbours": 0}, "neighbours"),
        ({"weights": "token_knn", "coverage": "per_token"}, "per_token"),
        ({"weights": "nearest_anchor", "coverage": "per_token"}, "per_token"),
    ],
)
def test_illegal_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KVCMAS(**settings)
