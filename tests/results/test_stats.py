"""Statistics against published values, closed forms and hand counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results import stats

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), Table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_intervals(k, n, low, high) -> None:
    assert stats.wilson_interval(k, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_edges() -> None:
    assert all(math.isnan(bound) for bound in stats.wilson_interval(0, 0))
    assert stats.wilson_interval(5, 5)[1] == pytest.approx(1)
    wide, narrow = stats.wilson_interval(5, 8, level=0.99), stats.wilson_interval(5, 8)
    assert wide[0] < narrow[0] < 5 / 8 < narrow[1] < wide[1]
    for k, n in ((3, 2), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match="successes"):
            stats.wilson_interval(k, n)


@given(n=st.integers(1, 200), data=st.data())
def test_wilson_contains_the_proportion_and_mirrors(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    low, high = stats.wilson_interval(k, n)
    assert 0 <= low <= k / n + 1e-12
    assert k / n - 1e-12 <= high <= 1
    assert (1 - high, 1 - low) == pytest.approx(stats.wilson_interval(n - k, n))


def test_bootstrap_agrees_with_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(3, 2, size=400)
    half = 1.96 * values.std() / math.sqrt(values.size)
    expected = (values.mean() - half, values.mean() + half)
    assert stats.bootstrap_ci(values, seed=0) == pytest.approx(expected, abs=0.02)


def test_bootstrap_is_seeded() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert stats.bootstrap_ci(values, seed=3) == stats.bootstrap_ci(values, seed=3)
    few = [stats.bootstrap_ci(values, seed=seed, n_resamples=50) for seed in range(5)]
    assert len(set(few)) > 1


def test_bootstrap_of_another_statistic() -> None:
    low, high = stats.bootstrap_ci([1.0, 2.0, 3.0, 4.0, 100.0], np.median, seed=0)
    assert (low, high) == (1.0, 100.0)


def test_bootstrap_without_spread_gives_no_false_interval() -> None:
    for values in ([], [5.0]):
        assert all(math.isnan(bound) for bound in stats.bootstrap_ci(values, seed=0))
    assert stats.bootstrap_ci([5.0] * 7, seed=0) == (5.0, 5.0)


def test_paired_bootstrap_uses_the_pairing() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0, 10, size=100)
    better = base + 1 + rng.normal(0, 0.1, size=100)
    difference = stats.paired_bootstrap(better, base, seed=0)
    assert difference.value == pytest.approx(1, abs=0.05)
    assert 0.9 < difference.low < difference.value < difference.high < 1.1
    unpaired = stats.paired_bootstrap(better, rng.permutation(base), seed=0)
    assert unpaired.low < 0 < unpaired.high


def test_paired_bootstrap_edges() -> None:
    assert all(math.isnan(number) for number in stats.paired_bootstrap([], [], seed=0))
    one = stats.paired_bootstrap([3.0], [1.0], seed=0)
    assert one.value == 2
    assert math.isnan(one.low)
    assert stats.paired_bootstrap([1, 2], [0, 1], seed=0) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="2 values paired with 1"):
        stats.paired_bootstrap([1, 2], [1], seed=0)


def test_cluster_bootstrap_of_two_clusters_by_hand() -> None:
    # Two clusters drawn twice: the same one with probability 1/4 each, so the 95% bounds are their
    # own means. The value is the mean of the five values, not of the two means.
    estimate = stats.cluster_bootstrap([1, 3, 6, 6, 9], ["a", "a", "b", "b", "b"], seed=0)
    assert estimate == (5.0, 2.0, 7.0)
    # One of each, half of all draws, pools ten values to 9, whatever their two means.
    pooled = stats.cluster_bootstrap([0] + [10] * 9, ["a"] + ["b"] * 9, seed=0, level=0.4)
    assert pooled == (9.0, 9.0, 9.0)


def test_cluster_bootstrap_of_clusters_of_one_is_the_plain_bootstrap() -> None:
    values = np.random.default_rng(2).normal(size=60)
    names = [f"{index:02d}" for index in range(60)]
    estimate = stats.cluster_bootstrap(values, names, seed=0)
    assert (estimate.low, estimate.high) == pytest.approx(stats.bootstrap_ci(values, seed=0))
    back = stats.cluster_bootstrap(values[::-1], names[::-1], seed=0)
    assert back == pytest.approx(estimate)  # the order of the rows does not matter


def test_repeating_a_cluster_does_not_narrow_the_interval() -> None:
    values, names = [1.0, 2.0, 4.0, 8.0], ["a", "b", "c", "d"]
    once = stats.cluster_bootstrap(values, names, seed=0)
    assert stats.cluster_bootstrap(values * 10, names * 10, seed=0) == pytest.approx(once)


def test_cluster_bootstrap_edges() -> None:
    assert all(math.isnan(number) for number in stats.cluster_bootstrap([], [], seed=0))
    one = stats.cluster_bootstrap([1.0, 3.0], ["a", "a"], seed=0)
    assert one.value == 2
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert stats.cluster_bootstrap([5.0, 5.0], ["a", "b"], seed=0) == (5.0, 5.0, 5.0)
    with pytest.raises(ValueError, match="2 values in 1 clusters"):
        stats.cluster_bootstrap([1.0, 2.0], ["a"], seed=0)


def test_holm_by_hand() -> None:
    # Sorted: .005 x 4 = .02, .01 x 3 = .03, .03 x 2 = .06, .04 x 1 = .04 raised to .06.
    assert stats.holm_bonferroni([0.01, 0.04, 0.03, 0.005]) == pytest.approx(
        [0.03, 0.06, 0.06, 0.02]
    )
    assert stats.holm_bonferroni([0.6, 0.5]) == [1.0, 1.0]
    assert stats.holm_bonferroni([]) == []
    with pytest.raises(ValueError, match="between 0 and 1"):
        stats.holm_bonferroni([0.5, 1.1])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_lies_between_the_raw_and_the_bonferroni_values(p_values: list[float]) -> None:
    adjusted = stats.holm_bonferroni(p_values)
    for raw, holm in zip(p_values, adjusted, strict=True):
        assert raw <= holm <= min(1.0, len(p_values) * max(raw, max(p_values))) + 1e-12
    assert min(adjusted) == pytest.approx(min(1.0, len(p_values) * min(p_values)))
    assert [x for _, x in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)


def test_recovered_gap() -> None:
    assert stats.recovered_gap(0.5, floor=0.2, ceiling=0.8) == pytest.approx(0.5)
    assert stats.recovered_gap(0.1, floor=0.2, ceiling=0.8) == pytest.approx(-1 / 6)
    # An error: FullShared is the floor, the exact cache the ceiling.
    assert stats.recovered_gap(0.029, floor=0.147, ceiling=0.0) == pytest.approx(118 / 147)
    assert math.isnan(stats.recovered_gap(0.5, floor=0.3, ceiling=0.3))


def test_percentile_is_linear() -> None:
    assert stats.percentile([10, 20, 30, 40], 50) == 25
    assert stats.percentile([10, 20, 30, 40], 90) == pytest.approx(37)
    assert math.isnan(stats.percentile([], 50))


def test_missing_values_are_refused_everywhere() -> None:
    for call in (
        lambda values: stats.percentile(values, 50),
        stats.mean_std,
        lambda values: stats.bootstrap_ci(values, seed=0),
        lambda values: stats.cluster_bootstrap(values, ["a", "b"], seed=0),
        stats.holm_bonferroni,
        lambda values: stats.recovered_gap(*values, 2.0),
    ):
        for missing in (None, math.nan):
            with pytest.raises(ValueError, match="missing value"):
                call([1.0, missing])


def test_mean_std() -> None:
    assert stats.mean_std([1, 2, 3, 4]) == pytest.approx((2.5, math.sqrt(5 / 3)))
    assert stats.mean_std([2.0])[0] == 2
    assert math.isnan(stats.mean_std([2.0])[1])
    assert all(math.isnan(number) for number in stats.mean_std([]))


def test_rho_counts_what_was_executed(make_turn, make_edge) -> None:
    first = make_edge(5, executed=20, action="dense", first=True, source=None)
    dense = make_edge(5, executed=20, action="dense")
    partial = make_edge(3, executed=6, action="recompute", slot="out0")
    turns = [
        make_turn(edges=(first,)),
        make_turn(edges=(make_edge(5), partial)),  # 20 + 12 shared, 6 executed
        make_turn(edges=(make_edge(5), dense)),  # 40 shared, 20 executed
    ]
    assert stats.rho(turns, "entry") == pytest.approx(1 - 26 / 72)
    assert stats.rho(turns, "transition") == 3 / 4
    assert stats.rho(turns, "call") == 1 / 2
    assert stats.rho(turns, "entry", include_first=True) == pytest.approx(1 - 46 / 92)
    assert stats.rho(turns, "transition", include_first=True) == 3 / 5
    assert stats.rho(turns, "call", include_first=True) == 1 / 3


def test_rho_of_a_replay_is_counted_the_same_way(
    make_turn, make_edge, make_fidelity, make_fidelity_edge
) -> None:
    shapes = [{"tokens": 5}, {"tokens": 3, "executed": 6, "action": "recompute", "slot": "out0"}]
    served = make_turn(edges=tuple(make_edge(**shape) for shape in shapes))
    replayed = make_fidelity(edges=tuple(make_fidelity_edge(**shape) for shape in shapes))
    assert stats.rho([replayed]) == stats.rho([served]) == 1 - 6 / 32


def test_rho_is_undefined_where_nothing_could_be_reused(make_turn, make_edge) -> None:
    first = make_edge(5, executed=20, action="dense", first=True, source=None)
    empty = make_edge(0)
    for how in ("entry", "transition", "call"):
        assert math.isnan(stats.rho([], how))
        assert math.isnan(stats.rho([make_turn(edges=(first, empty))], how))


def test_recomputing_everything_is_not_reuse(make_turn, make_edge) -> None:
    turns = [make_turn(edges=(make_edge(5, executed=20, action="recompute"),))]
    assert [stats.rho(turns, how) for how in ("entry", "transition", "call")] == [0, 0, 0]


def test_exchange_of_pairs_by_hand() -> None:
    # Of the 8 ways to exchange three pairs two give a mean difference as large as this one.
    assert stats.paired_p_value([3, 4, 5], [1, 2, 3], seed=0) == pytest.approx(2 / 8)
    assert stats.paired_p_value([1, 2], [1, 2], seed=0) == 1
    assert math.isnan(stats.paired_p_value([], [], seed=0))
    with pytest.raises(ValueError, match="1 values paired with 2"):
        stats.paired_p_value([1], [1, 2], seed=0)


def test_exchange_of_many_pairs_is_drawn() -> None:
    rng = np.random.default_rng(0)
    noise, shifted = rng.normal(size=40), rng.normal(size=40) + 2
    assert stats.paired_p_value(shifted, np.zeros(40), seed=0) < 0.001
    assert stats.paired_p_value(noise, np.zeros(40), seed=0) > 0.05
