"""What the analyses of `repro analyze` say on average, with bootstrap intervals over requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from results import stats
from results.analysis import KINDS, LONG

_SEED: Final = 0
_RESAMPLES: Final = 2_000
# One served segment.
_PLACE: Final = ["request", "node", "slot"]
# One matrix of a kind, and what is averaged over its layers (the lengths are constant).
_SEGMENT: Final = ["request", "slot", "role", "source", "target"]
_VALUES: Final = [
    *("effective_rank", "energy_r8", "error_r32", "relative_norm"),
    *("tokens", "pf_tokens", "width"),
]

_Floats: TypeAlias = npt.NDArray[np.float64]


def rank_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Effective ranks per kind, tensor and role of the slot, for all segments and for long ones.

    A segment's values are means over its layers; layer 0 of a delta, which is zero, is left out.
    ``rank_max_layer`` is the mean rank of the layer where it is highest.
    """
    frame = frame.dropna(subset="effective_rank")
    frame = frame.assign(role=frame["slot"].str.extract(r"^([a-z]+)", expand=False))
    rows = []
    for kind, tensor in product(KINDS, ("k", "v")):
        cell = frame[(frame["kind"] == kind) & (frame["tensor"] == tensor)]
        segments = cell.groupby(_SEGMENT, dropna=False, as_index=False)[_VALUES].mean()
        for role, least in product(("all", *sorted(cell["role"].unique())), (1, LONG)):
            parts = [
                f[(f["tokens"] >= least) & ((role == "all") | (f["role"] == role))]
                for f in (segments, cell)
            ]
            if len(parts[0]):
                names = {"kind": kind, "tensor": tensor, "slots": role, "least_tokens": least}
                rows.append({**names, **_ranks(*parts)})
    return pd.DataFrame(rows)


def _ranks(segments: pd.DataFrame, layers: pd.DataFrame) -> dict[str, object]:
    rank = stats.cluster_bootstrap(
        segments["effective_rank"].tolist(),
        segments["request"].astype(str).tolist(),
        seed=_SEED,
        n_resamples=_RESAMPLES,
    )
    return {
        "segments": len(segments),
        "tokens": segments["tokens"].median(),
        "pf_tokens": segments["pf_tokens"].median(),
        "width": segments["width"].iloc[0],
        "effective_rank": rank.value,
        "effective_rank_low": rank.low,
        "effective_rank_high": rank.high,
        "rank_max_layer": layers.groupby("layer")["effective_rank"].mean().max(),
        **{name: segments[name].mean() for name in ("energy_r8", "error_r32", "relative_norm")},
    }


def comparable(frame: pd.DataFrame, *, first: bool = False) -> pd.DataFrame:
    """Segments that both references corrected: what a pool could not serve would flatter it.

    ``first`` adds those that nobody held before: exact when chained, corrected otherwise.
    """
    kvcmas = frame[frame["correction"] == "kvcmas"]
    corrected = kvcmas[kvcmas["action"] == "correct"]
    served = corrected.groupby(_PLACE)["reference"].nunique()
    wanted = served.map(lambda references: references == 2)
    if first:
        new = corrected[corrected["holder"].isna()].groupby(_PLACE).size() > 0
        wanted = wanted | new.reindex(wanted.index, fill_value=False)
    return frame.merge(wanted[wanted].index.to_frame(index=False), on=_PLACE)


def chain_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Errors per reference and correction: of each agent, and of comparable segments together.

    A segment's error is the mean over its layers. An agent's segments include those that nobody
    held before, ``dense`` of them served exactly. ``chained - non-chained`` is paired by segment.
    """
    rows = []
    fair, by_agent = comparable(frame), comparable(frame, first=True)
    scopes = [(node, by_agent[by_agent["node"] == node]) for node in nodes(frame)]
    for scope, part in (*scopes, ("comparable", fair)):
        for (tensor, reference, correction), cell in part.groupby(
            ["tensor", "reference", "correction"], sort=True
        ):
            names = {"scope": scope, "tensor": tensor}
            names |= {"reference": reference, "correction": correction}
            errors = cell.groupby(_PLACE)["error"].mean()
            dense = cell.groupby(_PLACE)["action"].first().eq("dense").sum()
            rows.append({**names, **_mean(errors), "dense": dense})
    for tensor, part in fair[fair["correction"] == "kvcmas"].groupby("tensor"):
        paired = part.pivot_table(index=_PLACE, columns="reference", values="error")
        names = {"scope": "comparable", "tensor": tensor, "reference": "chained - non-chained"}
        difference = paired["source"] - paired["context-free"]
        rows.append({**names, "correction": "kvcmas", **_mean(difference), "dense": 0})
    return pd.DataFrame(rows)


def nodes(frame: pd.DataFrame) -> list[str]:
    """Nodes in execution order."""
    return frame.drop_duplicates("node").sort_values("turn")["node"].tolist()


def _mean(errors: pd.Series[float]) -> dict[str, object]:
    requests = errors.index.get_level_values("request").astype(str).tolist()
    error = stats.cluster_bootstrap(errors.tolist(), requests, seed=_SEED, n_resamples=_RESAMPLES)
    return {
        "segments": len(errors),
        "error": error.value,
        "error_low": error.low,
        "error_high": error.high,
    }


def coverage_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Table 2: share of the total reuse error removed, and that share over random selection's.

    ``energy`` counts squared relative errors, of which a random subset removes its own share;
    ``norm`` counts relative Frobenius errors as they are.
    """
    rows = []
    for (unit, rho), cell in frame.groupby(["unit", "rho"], sort=True):
        chance = cell[cell["criterion"] == "random"]
        for criterion, part in cell.groupby("criterion", sort=False):
            row: dict[str, object] = {"unit": unit, "criterion": criterion, "rho": rho}
            row["turns"] = len(part)
            row["budget"] = np.average(part["budget"], weights=part["tokens"])
            for measure in ("energy", "norm"):
                row |= dict(_coverage(part, chance, measure))
            rows.append(row)
    return pd.DataFrame(rows)


def _coverage(
    part: pd.DataFrame, chance: pd.DataFrame, measure: str
) -> Iterator[tuple[str, float]]:
    columns = [f"{measure}_before", f"{measure}_after"]
    sums, by_chance = (f.groupby("request")[columns].sum().to_numpy() for f in (part, chance))

    def coverage(index: _Floats, axis: int = -1) -> _Floats:
        return _removed(sums[index.astype(int)], axis)

    def relative(index: _Floats, axis: int = -1) -> _Floats:
        return coverage(index, axis) / _removed(by_chance[index.astype(int)], axis)

    requests = np.arange(len(sums), dtype=np.float64)
    for name, statistic in (("coverage", coverage), ("relative", relative)):
        yield f"{name}_{measure}", float(statistic(requests))
        bounds = stats.bootstrap_ci(requests, statistic, seed=_SEED, n_resamples=_RESAMPLES)
        yield from zip((f"{name}_{measure}_low", f"{name}_{measure}_high"), bounds, strict=True)


def _removed(sums: _Floats, axis: int) -> _Floats:
    """Share removed, from ``sums [..., (before, after)]``, pooled over ``axis`` of the rest."""
    before, after = np.moveaxis(sums, -1, 0)
    return np.asarray(1 - after.sum(axis=axis) / before.sum(axis=axis))
