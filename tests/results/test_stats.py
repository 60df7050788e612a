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


def test_percentile_is_linear() -> None:
    assert stats.percentile([10, 20, 30, 40], 50) == 25
    assert stats.percentile([10, 20, 30, 40], 90) == pytest.approx(37)
    assert math.isnan(stats.percentile([], 50))


def test_missing_values_are_refused_everywhere() -> None:
    for call in (
        lambda values: stats.percentile(values, 50),
        stats.mean_std,
        lambda values: stats.bootstrap_ci(values, seed=0),
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


def test_rho_is_undefined_where_nothing_could_be_reused(make_turn, make_edge) -> None:
    first = make_edge(5, executed=20, action="dense", first=True, source=None)
    empty = make_edge(0)
    for how in ("entry", "transition", "call"):
        assert math.isnan(stats.rho([], how))
        assert math.isnan(stats.rho([make_turn(edges=(first, empty))], how))


def test_recomputing_everything_is_not_reuse(make_turn, make_edge) -> None:
    turns = [make_turn(edges=(make_edge(5, executed=20, action="recompute"),))]
    assert [stats.rho(turns, how) for how in ("entry", "transition", "call")] == [0, 0, 0]
