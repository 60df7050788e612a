"""Claims about caches and deltas: C14 to C17 and C36, from the files of `repro analyze`.

Every model and benchmark that was analysed has to bear a claim out; models without training are
left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pandas as pd

from results.analysis import LONG, Analysis
from results.analysis_summary import chain_summary, coverage_summary, nodes, rank_summary
from results.claims import Claim, Verdict
from results.names import RANDOM_WEIGHTS
from results.verdicts import Evaluation, Measured, evaluates_analyses

# A.2 can be read in several ways; the claim holds if one of them fits.
_READINGS: Final = ("pf_system", "pf_presence", "pf_bare", "pf_glue")
_SELECTIONS: Final = (("layer", "layer"), ("token", "deviation"), ("token", "attention"))
_VISION: Final = frozenset(("mathvista", "videomme"))
# Rounding of an exact cache that was rotated to its place.
_EXACT: Final = 1e-5


@evaluates_analyses("C14")
def _delta_ranks(claim: Claim, analyses: Sequence[Analysis]) -> Evaluation | None:
    """Deltas below rank 32, and bases slightly above deltas; long segments, if there are any."""
    bound = claim.paper_values[0].value or 0.0
    measured: list[Measured] = []
    holds = True
    used = _trained(analyses, "ranks")
    for analysis in used:
        summary = rank_summary(analysis.frame)
        for tensor in ("k", "v"):
            rank = {kind: _rank(summary, analysis, kind, tensor) for kind in ("base", "delta")}
            base, delta = rank["base"], rank["delta"]
            if base is None or delta is None:
                return None
            measured += [delta, base]
            holds &= delta.high < bound and base.value > delta.value
    return _evaluation(holds, measured, used)


@evaluates_analyses("C15")
def _pf_ranks(claim: Claim, analyses: Sequence[Analysis]) -> Evaluation | None:
    """PF-induced deltas of rank 4 to 6, of which rank 8 keeps over 90%, in one reading at least."""
    ranks, energy = claim.paper_values
    measured: list[Measured] = []
    fits = dict.fromkeys(_READINGS, True)
    used = _trained(analyses, "ranks")
    for analysis in used:
        summary = rank_summary(analysis.frame)
        for kind in _READINGS:
            for tensor in ("k", "v"):
                rank = _rank(summary, analysis, kind, tensor)
                kept = _long(summary, kind, tensor)["energy_r8"]
                if rank is None or kept.empty:
                    fits[kind] = False
                    continue
                name = f"{_of(analysis)}: energy of {kind} {tensor.upper()} that rank 8 keeps"
                share = Measured(name, float(kept.iloc[0]))
                measured += [rank, share]
                inside = (ranks.low or 0) <= rank.low and rank.high <= (ranks.high or 0)
                fits[kind] &= inside and share.value > (energy.value or 0)
    return _evaluation(any(fits.values()), measured, used) if measured else None


@evaluates_analyses("C16")
def _chaining(claim: Claim, analyses: Sequence[Analysis]) -> Evaluation | None:
    """Chained minus non-chained error below 0, and the first agent exact."""
    measured: list[Measured] = []
    holds = True
    used = _trained(analyses, "chain")
    for analysis in used:
        summary = chain_summary(analysis.frame)
        first = summary[
            (summary["scope"] == nodes(analysis.frame)[0])
            & (summary["reference"] == "source")
            & (summary["correction"] == "kvcmas")
        ]
        difference = summary[summary["reference"] == "chained - non-chained"]
        if difference.empty:
            return None
        for _, row in difference.iterrows():
            name = f"{_of(analysis)}: error of {row['tensor'].upper()}, chained - non-chained"
            measured.append(Measured(name, row["error"], row["error_low"], row["error_high"]))
            holds &= row["error_high"] < 0
        for _, row in first.iterrows():
            name = f"{_of(analysis)}: error of the first agent's {row['tensor'].upper()}"
            measured.append(Measured(name, float(row["error"])))
        holds &= bool((first["error"] < _EXACT).all())
    return _evaluation(holds, measured, used)


@evaluates_analyses("C17")
def _left(claim: Claim, analyses: Sequence[Analysis]) -> Evaluation | None:
    """Share of the reuse error that each selection leaves, at rho 0.9 on text, 0.8 on pictures."""
    least = claim.paper_values[0].value or 0.0
    measured: list[Measured] = []
    used = _trained(analyses, "coverage")
    for analysis in used:
        rho = 0.8 if analysis.provenance.get("bench") in _VISION else 0.9
        for row, name in _selected(analysis, (rho,)):
            removed = [row[f"coverage_energy{bound}"] for bound in ("", "_high", "_low")]
            value, low, high = (1 - float(share) for share in removed)
            measured.append(Measured(f"left by {name}", value, low, high))
    return _evaluation(all(one.low >= least for one in measured), measured, used)


@evaluates_analyses("C36")
def _better_than_random(claim: Claim, analyses: Sequence[Analysis]) -> Evaluation | None:
    """Error that each selection removes over that of random selection, above 1 at both ratios."""
    measured: list[Measured] = []
    used = _trained(analyses, "coverage")
    for analysis in used:
        for row, name in _selected(analysis, (0.9, 0.8)):
            values = (float(row[f"relative_energy{bound}"]) for bound in ("", "_low", "_high"))
            measured.append(Measured(f"{name} over random", *values))
    return _evaluation(all(one.low > 1 for one in measured), measured, used)


def _selected(analysis: Analysis, ratios: Sequence[float]) -> Iterable[tuple[pd.Series, str]]:
    """Rows of the summary for the paper's three selections, with their names."""
    summary = coverage_summary(analysis.frame)
    for _, row in summary.iterrows():
        if (row["unit"], row["criterion"]) in _SELECTIONS and row["rho"] in ratios:
            yield row, f"{row['criterion']} at rho {row['rho']:g} ({_of(analysis)})"


def _rank(summary: pd.DataFrame, analysis: Analysis, kind: str, tensor: str) -> Measured | None:
    rows = _long(summary, kind, tensor)
    if rows.empty:
        return None
    row = rows.iloc[0]
    values = (float(row[f"effective_rank{bound}"]) for bound in ("", "_low", "_high"))
    length = f"{row['segments']} segments of {row['least_tokens']} tokens or more"
    return Measured(f"{_of(analysis)}: rank of {kind} {tensor.upper()}, {length}", *values)


def _long(summary: pd.DataFrame, kind: str, tensor: str) -> pd.DataFrame:
    """Rows over all slots, long segments first: a short one bounds its rank by its length."""
    rows = summary[
        (summary["kind"] == kind) & (summary["tensor"] == tensor) & (summary["slots"] == "all")
    ]
    return rows[rows["least_tokens"].isin((1, LONG))].sort_values("least_tokens", ascending=False)


def _trained(analyses: Sequence[Analysis], name: str) -> list[Analysis]:
    return [a for a in analyses if a.name == name and _model(a) not in RANDOM_WEIGHTS]


def _model(analysis: Analysis) -> str:
    return analysis.provenance.get("model", "").partition("@")[0]


def _of(analysis: Analysis) -> str:
    return f"{_model(analysis)} on {analysis.provenance.get('bench', '')}"


def _evaluation(
    holds: bool, measured: Sequence[Measured], used: Sequence[Analysis]
) -> Evaluation | None:
    if not measured:
        return None
    verdict: Verdict = "agrees" if holds else "disagrees"
    settings = "; ".join(
        dict.fromkeys(
            f"{_of(a)} ({a.provenance.get('data', '')}), n = {a.provenance.get('n', '')},"
            f" {a.provenance.get('device', '')}"
            for a in used
        )
    )
    return Evaluation(verdict, tuple(measured), tuple(a.key for a in used), settings)
