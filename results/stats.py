"""Every statistic a table or a figure shows.

Intervals are two-sided. Nothing here invents a number: what cannot be estimated is NaN, and a
missing value among the inputs is refused rather than skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats as scipy_stats

from results.schema import EdgeRecord, ExecutedTurn

Values = Sequence[float] | npt.NDArray[np.float64]
RhoCount = Literal["entry", "transition", "call"]


class Estimate(NamedTuple):
    """A value with its interval; the bounds are NaN where the data do not give one."""

    value: float
    low: float
    high: float


def wilson_interval(k: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion k/n, as fractions; (nan, nan) for n = 0.

    ``k`` may be fractional: with several runs over the same questions it is the sum of per-question
    means, so that repeating a question does not narrow the interval. Raises ValueError unless
    0 <= k <= n.
    """
    if n < 0 or not 0 <= k <= n:
        raise ValueError(f"{k} successes in {n} trials")
    if n == 0:
        return math.nan, math.nan
    z = float(scipy_stats.norm.ppf(0.5 + level / 2))
    p = k / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def bootstrap_ci(
    values: Values,
    statistic: Callable[..., npt.NDArray[np.float64] | np.floating] = np.mean,
    *,
    seed: int,
    n_resamples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile bootstrap interval of a statistic, which should take ``axis`` to be fast.

    Fewer than two values give (nan, nan): one value says nothing about its spread. Equal values
    give a degenerate interval at the statistic.
    """
    data = _numbers(values)
    if data.size < 2:
        return math.nan, math.nan
    if np.all(data == data[0]):
        point = float(statistic(data))
        return point, point
    return _resampled((data,), statistic, seed, n_resamples, level)


def paired_bootstrap(
    a: Values, b: Values, *, seed: int, n_resamples: int = 10_000, level: float = 0.95
) -> Estimate:
    """Difference of means, mean(a) - mean(b), with a[i] and b[i] measured on the same sample.

    Pairs are resampled, which is the same as resampling the differences; :func:`bootstrap_ci` says
    when there is no interval. Raises ValueError if the lengths differ.
    """
    first, second = _numbers(a), _numbers(b)
    if first.size != second.size:
        raise ValueError(f"{first.size} values paired with {second.size}")
    difference = first - second
    if difference.size == 0:
        return Estimate(math.nan, math.nan, math.nan)
    interval = bootstrap_ci(difference, seed=seed, n_resamples=n_resamples, level=level)
    return Estimate(float(difference.mean()), *interval)


def paired_p_value(a: Values, b: Values, *, seed: int, n_resamples: int = 9_999) -> float:
    """Two-sided p-value of a difference of means of pairs, by exchanging the members of pairs.

    All exchanges are tried where there are fewer than ``n_resamples``. NaN without a pair. Raises
    ValueError if the lengths differ.
    """
    first, second = _numbers(a), _numbers(b)
    if first.size != second.size:
        raise ValueError(f"{first.size} values paired with {second.size}")
    if not first.size or np.all(first == second):
        return 1.0 if first.size else math.nan

    def difference(
        x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], axis: int = -1
    ) -> npt.NDArray[np.float64]:
        return np.asarray((x - y).mean(axis=axis))

    tested = scipy_stats.permutation_test(
        (first, second),
        difference,
        permutation_type="samples",
        n_resamples=n_resamples,
        batch=max(1, 4_000_000 // first.size),
        rng=np.random.default_rng(seed),
    )
    return float(tested.pvalue)


def cluster_bootstrap(
    values: Values,
    clusters: Sequence[str],
    *,
    seed: int,
    n_resamples: int = 10_000,
    level: float = 0.95,
) -> Estimate:
    """Mean of all values; its interval comes from resampling whole clusters.

    ``clusters[i]`` names what ``values[i]`` was measured on, for instance the sample whose turns
    are not independent of one another. Clusters may differ in size; a large one weighs more, as it
    does in the mean. Fewer than two clusters give no interval, equal values a degenerate one.
    Raises ValueError if the lengths differ.
    """
    data = _numbers(values)
    if data.size != len(clusters):
        raise ValueError(f"{data.size} values in {len(clusters)} clusters")
    if data.size == 0:
        return Estimate(math.nan, math.nan, math.nan)
    _, member = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    point, counts = float(data.mean()), np.bincount(member)
    if counts.size < 2:
        return Estimate(point, math.nan, math.nan)
    if np.all(data == data[0]):
        return Estimate(point, point, point)
    sums = np.bincount(member, weights=data)

    def pooled_mean(
        sums: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], axis: int = -1
    ) -> npt.NDArray[np.float64]:
        return np.asarray(sums.sum(axis=axis) / counts.sum(axis=axis))

    return Estimate(point, *_resampled((sums, counts), pooled_mean, seed, n_resamples, level))


def cluster_percentile(
    values: Values,
    clusters: Sequence[str],
    q: float,
    *,
    seed: int,
    n_resamples: int = 2_000,
    level: float = 0.95,
) -> Estimate:
    """q-th percentile (0 to 100) of all values; its interval from resampling whole clusters.

    See :func:`cluster_bootstrap` for clusters. Raises ValueError if the lengths differ.
    """
    data = _numbers(values)
    point, counts = percentile(data, q), _cluster_counts(data, clusters, seed, n_resamples)
    if counts is None:
        return Estimate(point, math.nan, math.nan)
    drawn = _weighted_percentile(data, counts, q)
    return Estimate(point, *_middle(drawn, level))


def percentile_ratio(
    a: Values,
    b: Values,
    clusters: Sequence[str],
    q: float,
    *,
    seed: int,
    n_resamples: int = 2_000,
    level: float = 0.95,
) -> Estimate:
    """Ratio of the q-th percentiles of ``a`` and ``b``, with a[i] and b[i] on the same request.

    A resample takes the same clusters on both sides. Raises ValueError if the lengths differ.
    """
    first, second = _numbers(a), _numbers(b)
    if first.size != second.size:
        raise ValueError(f"{first.size} values paired with {second.size}")
    if not first.size:
        return Estimate(math.nan, math.nan, math.nan)
    point = percentile(first, q) / percentile(second, q)
    counts = _cluster_counts(first, clusters, seed, n_resamples)
    if counts is None:
        return Estimate(point, math.nan, math.nan)
    drawn = _weighted_percentile(first, counts, q) / _weighted_percentile(second, counts, q)
    return Estimate(point, *_middle(drawn, level))


def ratio_of_sums(
    a: Values, b: Values, *, seed: int, n_resamples: int = 10_000, level: float = 0.95
) -> Estimate:
    """sum(a) / sum(b), with a[i] and b[i] of the same cluster; interval from resampling clusters.

    With equal numbers of values behind both sums this is the ratio of their means. NaN without
    values, no interval with fewer than two. Raises ValueError if the lengths differ.
    """
    first, second = _numbers(a), _numbers(b)
    if first.size != second.size:
        raise ValueError(f"{first.size} values paired with {second.size}")
    if not first.size:
        return Estimate(math.nan, math.nan, math.nan)
    point = float(first.sum() / second.sum())
    if first.size < 2:
        return Estimate(point, math.nan, math.nan)

    def quotient(
        x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], axis: int = -1
    ) -> npt.NDArray[np.float64]:
        return np.asarray(x.sum(axis=axis) / y.sum(axis=axis))

    return Estimate(point, *_resampled((first, second), quotient, seed, n_resamples, level))


def holm_bonferroni(p_values: Values) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (family-wise error rate).

    Raises ValueError for a number that is no probability.
    """
    p = _numbers(p_values)
    if np.any((p < 0) | (p > 1)):
        raise ValueError("a p-value lies between 0 and 1")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1)
    return [float(value) for value in adjusted]


def recovered_gap(method: float, floor: float, ceiling: float) -> float:
    """Share of the gap between floor and ceiling that a method closes (performance gap recovered).

    Works for scores and for errors alike, the ceiling being the better end: 0 at the floor, 1 at
    the ceiling, negative below the floor. NaN if there is no gap.
    """
    score, low, high = (float(value) for value in _numbers([method, floor, ceiling]))
    return (score - low) / (high - low) if high != low else math.nan


def percentile(values: Values, q: float) -> float:
    """q-th percentile (0 to 100) with linear interpolation; NaN if there are no values."""
    data = _numbers(values)
    return float(np.percentile(data, q, method="linear")) if data.size else math.nan


def mean(values: Values) -> float:
    """Arithmetic mean; NaN if there are no values."""
    data = _numbers(values)
    return float(data.mean()) if data.size else math.nan


def mean_std(values: Values) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); the latter is NaN for fewer than two values."""
    data = _numbers(values)
    return mean(values), float(data.std(ddof=1)) if data.size > 1 else math.nan


def rho(
    turns: Iterable[ExecutedTurn], how: RhoCount = "entry", *, include_first: bool = False
) -> float:
    """Share of what could be reused that was (DESIGN section 5, rule 5); NaN if nothing could be.

    An edge on which nobody held the segment yet has nothing to reuse and is left out, unless
    ``include_first``; empty segments never count.

    - ``entry``: shared (layer, token) entries that no model execution rebuilt, of all of them.
    - ``transition``: edges reused, of all edges. An edge is reused if the method did anything but
      execute it densely *and* at least one of its entries was not executed: a selective method that
      recomputes everything has reused nothing.
    - ``call``: turns in which every such edge was reused, of all turns that have one.
    """
    per_turn = [
        [edge for edge in turn.edges if edge.tokens and (include_first or not edge.first)]
        for turn in turns
    ]
    edges = [edge for turn_edges in per_turn for edge in turn_edges]
    if not edges:
        return math.nan
    if how == "entry":
        executed = sum(edge.executed_entries for edge in edges)
        return 1 - executed / sum(edge.shared_entries for edge in edges)
    if how == "transition":
        return mean([float(_reused(edge)) for edge in edges])
    return mean([float(all(map(_reused, call))) for call in per_turn if call])


def _resampled(
    data: tuple[npt.NDArray[np.generic], ...],
    statistic: Callable[..., npt.NDArray[np.float64] | np.floating],
    seed: int,
    n_resamples: int,
    level: float,
) -> tuple[float, float]:
    """Percentile interval; several arrays of one length are resampled together."""
    interval = scipy_stats.bootstrap(
        data,
        statistic,
        n_resamples=n_resamples,
        batch=max(1, 4_000_000 // data[0].size),
        paired=len(data) > 1,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _cluster_counts(
    data: npt.NDArray[np.float64], clusters: Sequence[str], seed: int, n_resamples: int
) -> npt.NDArray[np.int64] | None:
    """How often each value is drawn, ``[resamples, values]``; None with fewer than two clusters."""
    if data.size != len(clusters):
        raise ValueError(f"{data.size} values in {len(clusters)} clusters")
    _, member = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    groups = int(member.max()) + 1 if member.size else 0
    if groups < 2:
        return None
    drawn = np.random.default_rng(seed).integers(groups, size=(n_resamples, groups))
    counts = np.stack([(drawn == group).sum(axis=1) for group in range(groups)], axis=1)
    return counts[:, member]


def _weighted_percentile(
    data: npt.NDArray[np.float64], counts: npt.NDArray[np.int64], q: float
) -> npt.NDArray[np.float64]:
    """Linear percentile of ``data [values]``, each repeated as ``counts [resamples, values]``."""
    order = np.argsort(data)
    cumulated = counts[:, order].cumsum(axis=1)
    rank = (cumulated[:, -1] - 1) * q / 100
    low = np.floor(rank)

    def at(index: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return data[order][(cumulated > index[:, None]).argmax(axis=1)]

    below = at(low)
    return np.asarray(below + (rank - low) * (at(np.ceil(rank)) - below))


def _middle(drawn: npt.NDArray[np.float64], level: float) -> tuple[float, float]:
    tail = 50 * (1 - level)
    return percentile(drawn, tail), percentile(drawn, 100 - tail)


def _reused(edge: EdgeRecord) -> bool:
    return edge.action != "dense" and edge.executed_entries < edge.shared_entries


def _numbers(values: Values) -> npt.NDArray[np.float64]:
    data = np.asarray(values, dtype=np.float64)  # None becomes NaN here
    if np.isnan(data).any():
        raise ValueError("a missing value (None or NaN) cannot be part of a statistic")
    return data
