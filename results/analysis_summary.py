"""What the analyses of `repro analyze` say on average, with bootstrap intervals over requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from results import stats
from results.analysis import KINDS, LONG

_SEED: Final = 0
_RESAMPLES: Final = 2_000
# One served segment.
_PLACE: Final = ["request", "node", "slot"]


def rank_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Effective ranks per kind, tensor and role of the slot, for all segments and for long ones.

    A segment's rank is the mean over its layers; layer 0 of a delta, which is zero, is left out.
    ``rank_max_layer`` is the mean rank of the layer where it is highest.
    """
    frame = frame.dropna(subset="effective_rank")
    role = frame["slot"].str.extract(r"^([a-z]+)", expand=False)
    rows = []
    for kind in KINDS:
        for tensor in ("k", "v"):
            for slots in ("all", *sorted(role.unique())):
                for least in (1, LONG):
                    part = frame[
                        (frame["kind"] == kind)
                        & (frame["tensor"] == tensor)
                        & (frame["tokens"] >= least)
                        & (True if slots == "all" else role == slots)
                    ]
                    if len(part):
                        names = {"kind": kind, "tensor": tensor, "slots": slots}
                        rows.append({**names, "least_tokens": least, **_ranks(part)})
    return pd.DataFrame(rows)


def _ranks(part: pd.DataFrame) -> dict[str, object]:
    place = ["request", "slot", "source", "target"]
    segments = part.groupby(place, dropna=False, as_index=False).agg(
        rank=("effective_rank", "mean"), tokens=("tokens", "first"), pf=("pf_tokens", "first")
    )
    rank = stats.cluster_bootstrap(
        segments["rank"].to_numpy(),
        segments["request"].tolist(),
        seed=_SEED,
        n_resamples=_RESAMPLES,
    )
    return {
        "segments": len(segments),
        "tokens": segments["tokens"].median(),
        "pf_tokens": segments["pf"].median(),
        "width": part["width"].iloc[0],
        "effective_rank": rank.value,
        "effective_rank_low": rank.low,
        "effective_rank_high": rank.high,
        "rank_max_layer": part.groupby("layer")["effective_rank"].mean().max(),
        "energy_r8": part["energy_r8"].mean(),
        "error_r32": part["error_r32"].mean(),
        "relative_norm": part["relative_norm"].mean(),
    }


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """Segments that both references corrected: what either left dense would flatter it.

    Only these compare chained with non-chained correction. Segments nobody held before, the first
    agent's, are not among them.
    """
    corrected = frame[(frame["correction"] == "kvcmas") & (frame["action"] == "correct")]
    both = corrected.groupby(_PLACE)["reference"].nunique()
    return frame.merge(both[both == 2].index.to_frame(index=False), on=_PLACE)


def chain_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Errors per reference and correction: of each agent, and of the comparable segments together.

    A segment's error is the mean over its layers. ``chained - non-chained`` is paired by segment.
    """
    rows = []
    fair = comparable(frame)
    order = frame.drop_duplicates("node").sort_values("turn")["node"]
    scopes = [
        *((node, frame[frame["node"] == node]) for node in order),
        ("comparable", fair),
    ]
    for scope, part in scopes:
        for (tensor, reference, correction), cell in part.groupby(
            ["tensor", "reference", "correction"], sort=True
        ):
            names = {"scope": scope, "tensor": tensor}
            names |= {"reference": reference, "correction": correction}
            errors = cell.groupby(_PLACE)["error"].mean()
            dense = cell.groupby(_PLACE)["action"].first().eq("dense").sum()
            rows.append({**names, **_mean(errors), "dense": dense})
    for tensor, part in fair[fair["correction"] == "kvcmas"].groupby("tensor"):
        errors = part.pivot_table(index=_PLACE, columns="reference", values="error")
        names = {"scope": "comparable", "tensor": tensor, "reference": "chained - non-chained"}
        difference = errors["source"] - errors["context-free"]
        rows.append({**names, "correction": "kvcmas", **_mean(difference), "dense": 0})
    return pd.DataFrame(rows)


def _mean(errors: pd.Series[float]) -> dict[str, object]:
    requests = errors.index.get_level_values("request").astype(str).tolist()
    error = stats.cluster_bootstrap(errors.to_numpy(), requests, seed=_SEED, n_resamples=_RESAMPLES)
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

    def coverage(index: npt.NDArray[np.float64], axis: int = -1) -> npt.NDArray[np.float64]:
        before, after = np.moveaxis(sums[index.astype(int)], -1, 0)
        return np.asarray(1 - after.sum(axis=axis) / before.sum(axis=axis))

    def relative(index: npt.NDArray[np.float64], axis: int = -1) -> npt.NDArray[np.float64]:
        before, after = np.moveaxis(by_chance[index.astype(int)], -1, 0)
        return np.asarray(
            coverage(index, axis) / (1 - after.sum(axis=axis) / before.sum(axis=axis))
        )

    requests = np.arange(len(sums), dtype=np.float64)
    for name, statistic in (("coverage", coverage), ("relative", relative)):
        yield f"{name}_{measure}", float(statistic(requests))
        bounds = stats.bootstrap_ci(requests, statistic, seed=_SEED, n_resamples=_RESAMPLES)
        yield from zip((f"{name}_{measure}_low", f"{name}_{measure}_high"), bounds, strict=True)
