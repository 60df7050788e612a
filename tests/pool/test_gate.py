import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcmas.pool.gate import (
    Gate,
    normalised_entropy,
    shared_prefix,
    softmax_scores,
    used_anchors,
)


def distances(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_distances_give_entropy_one(count: int) -> None:
    assert normalised_entropy(distances(*[812.5] * count)) == pytest.approx(1.0, abs=1e-12)


def test_one_clear_winner_gives_entropy_zero_without_overflow() -> None:
    assert normalised_entropy(distances(1e6, 0.0, 1e6)) == 0.0
    assert normalised_entropy(distances(5e5, 1e6, 1e6)) == 0.0


def test_entropy_is_that_of_the_softmax() -> None:
    d = distances(1.0, 2.0, 4.0)
    p = [math.exp(-x) / sum(math.exp(-y) for y in d.tolist()) for x in d.tolist()]
    expected = -sum(x * math.log2(x) for x in p) / math.log2(3)
    assert normalised_entropy(d) == pytest.approx(expected, rel=1e-12)
    assert softmax_scores(d).tolist() == pytest.approx(p, rel=1e-12)


def test_temperature_flattens() -> None:
    d = distances(1.0, 2.0, 4.0)
    assert normalised_entropy(d, 10.0) > normalised_entropy(d) > normalised_entropy(d, 0.1)
    torch.testing.assert_close(softmax_scores(d, 2.0), softmax_scores(d / 2))


def test_small_differences_of_large_distances_count() -> None:
    # In bf16 both were 900: the gate would see a tie.
    flat = normalised_entropy(distances(900.0, 900.0))
    assert normalised_entropy(distances(900.0, 902.0)) < flat - 0.2


def test_entropy_needs_two() -> None:
    with pytest.raises(ValueError, match="at least two"):
        normalised_entropy(distances(1.0))


@pytest.mark.parametrize(
    ("length", "anchors", "expected"),
    [
        (10, [12, 15], 10),
        (10, [4, 12, 7], 7),
        (10, [4, 12], 4),
        (10, [3, 3, 3], 3),
        (10, [12], 0),
        (10, [], 0),
    ],
)
def test_shared_prefix(length: int, anchors: list[int], expected: int) -> None:
    assert shared_prefix(length, anchors) == expected


@given(st.integers(1, 20), st.lists(st.integers(1, 25), max_size=6))
def test_shared_prefix_is_the_longest_that_two_cover(length: int, anchors: list[int]) -> None:
    covered = [k for k in range(1, length + 1) if sum(n >= k for n in anchors) >= 2]
    assert shared_prefix(length, anchors) == max(covered, default=0)


@pytest.mark.parametrize(
    ("scores", "plain", "quirk"),
    [
        ([0.95, 0.03, 0.02], [0], [0, 1, 2]),
        ([0.02, 0.95, 0.03], [1], [1, 2, 0]),
        ([0.5, 0.3, 0.2], [0, 1], [0, 1]),
        ([0.3, 0.3, 0.3, 0.1], [0, 1], [0, 1]),
        ([0.5, 0.5], [0], [0]),
        ([1.0], [0], [0]),
    ],
)
def test_used_anchors(scores: list[float], plain: list[int], quirk: list[int]) -> None:
    assert used_anchors(torch.tensor(scores)) == plain
    assert used_anchors(torch.tensor(scores), quirk=True) == quirk


def test_the_gate_accepts_up_to_the_threshold() -> None:
    d = distances(1.0, 1.5, 2.5)
    entropy = normalised_entropy(d)
    at, below = Gate(entropy).judge(d), Gate(math.nextafter(entropy, 0)).judge(d)
    assert (at.accepted, at.reason, at.entropy) == (True, "accepted", entropy)
    assert (below.accepted, below.reason, below.entropy) == (False, "entropy", entropy)
    assert at.used == (0, 1)
    assert below.used == ()


def test_threshold_one_accepts_ties_and_zero_refuses_them() -> None:
    tie = distances(*[3.0] * 5)
    assert Gate(1.0).judge(tie).accepted
    assert not Gate(0.0).judge(tie).accepted
    assert Gate(0.0).judge(distances(0.0, 1e4)).accepted


@pytest.mark.parametrize("forced", [None, True, False])
@pytest.mark.parametrize("bypass", [False, True])
def test_without_anchors_nothing_is_corrected(forced: bool | None, bypass: bool) -> None:
    assert not Gate(1.0, bypass=bypass).judge(distances(), forced).accepted


@pytest.mark.parametrize(("bypass", "forced"), [*itertools.product([False, True], [None, True])])
def test_a_single_anchor_serves_only_a_bypassed_or_forced_gate(
    bypass: bool, forced: bool | None
) -> None:
    verdict = Gate(1.0, bypass=bypass).judge(distances(7.0), forced)
    assert verdict.accepted == (bypass or forced is True)
    assert verdict.entropy is None
    assert verdict.used == ((0,) if verdict.accepted else ())


def test_force_overrules_the_entropy_and_says_so() -> None:
    tie = distances(3.0, 3.0)
    accepted, refused = Gate(0.1).judge(tie, True), Gate(1.0).judge(tie, False)
    assert (accepted.accepted, accepted.reason) == (True, "forced")
    assert accepted.entropy == pytest.approx(1.0)
    assert (refused.accepted, refused.reason) == (False, "forced")
