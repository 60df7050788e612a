"""Tables 6 and 8: what KVCMAS's threshold trades, and what chaining corrections brings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from results import stats
from results.accuracy import (
    ACCURACY,
    DIFFERENCE,
    INTERVALS,
    accuracy_cells,
    baseline_scores,
    difference_cells,
    gated,
    grouped,
    scores,
)
from results.benches import PAPER_TAU, bench_order, unmeasured
from results.records import Run
from results.tables import Column, provenance, register

# What the paper varies here: one language and one vision-language benchmark.
PAPER_BENCHES = ("mmlu", "videomme")
_SWEEP = "repro accuracy --bench BENCH --study threshold"
_CHAINING = "repro accuracy --bench BENCH --study chaining"

THRESHOLD = (
    Column("bench", "Bench", "string"),
    Column("variant", "Other settings", "string", hide_if_empty=True),
    Column("tau", "tau", digits=4),
    Column("main", "Main evaluation", "string"),
    Column("n", "n", "Int64"),
    ACCURACY,
    DIFFERENCE,
    Column("n_paired", "n paired", "Int64"),
    Column("rho_entry", "rho entry", digits=3),
    Column("rho_transition", "rho transition", digits=3),
)
CHAINING = (
    Column("bench", "Bench", "string"),
    Column("correction", "Correction", "string"),
    Column("variant", "Other settings", "string", hide_if_empty=True),
    Column("tau", "tau", digits=4),
    Column("rho_entry", "rho entry", digits=3),
    Column("n", "n", "Int64"),
    ACCURACY,
    Column("chained_points", "chained minus non-chained [95% CI]", digits=1, interval=True),
    Column("n_paired", "n paired", "Int64"),
)


def _threshold_footer(runs: Sequence[Run]) -> tuple[str, ...]:
    return (
        *provenance(runs),
        INTERVALS,
        "main evaluation: the threshold was calibrated for a reuse ratio, or is the paper's",
        *unmeasured(_of_kvcmas(runs), PAPER_BENCHES, _SWEEP),
    )


def _chaining_footer(runs: Sequence[Run]) -> tuple[str, ...]:
    own = _of_kvcmas(runs)
    notes = [INTERVALS]
    for chained, name in ((True, "chained"), (False, "non-chained")):
        half = [run for run in own if run.info.settings.get("chained") is chained]
        notes += [f"{name} {line}" for line in unmeasured(half, PAPER_BENCHES, _CHAINING)]
    return (*provenance(runs), *notes)


@register(
    "6",
    title="effect of the threshold tau on accuracy and reuse ratio of KVCMAS",
    columns=THRESHOLD,
    kinds=("accuracy",),
    command=_SWEEP.replace("BENCH", "mmlu"),
    footer=_threshold_footer,
)
def threshold_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per benchmark and threshold of chained KVCMAS."""
    baselines = baseline_scores(runs)
    chained = [run for run in _of_kvcmas(runs) if run.info.settings.get("chained") is True]
    cells = sorted(
        grouped(chained).items(),
        key=lambda item: (bench_order(item[0].bench), _others(item[1][0]), _tau(item[1][0])),
    )
    rows = []
    for cell, repeats in cells:
        bench, tau = cell.bench, _tau(repeats[0])
        own = scores(repeats)
        difference, n_paired = difference_cells(own, baselines.get(bench, {}))
        turns = [turn for run in repeats for turn in run.turns]
        calibrated = any(run.info.target_rho is not None for run in repeats)
        main = "calibrated" if calibrated else "paper" if tau == PAPER_TAU.get(bench) else ""
        rows.append(
            {
                "bench": bench,
                "variant": _others(repeats[0]),
                "tau": tau,
                "main": main,
                "n": len(own),
                **accuracy_cells(own),
                **difference,
                "n_paired": n_paired or None,
                "rho_entry": stats.rho(turns, "entry"),
                "rho_transition": stats.rho(turns, "transition"),
            }
        )
    return pd.DataFrame(rows, columns=[name for c in THRESHOLD for name in c.frame_names])


@register(
    "8",
    title="accuracy of chained and non-chained KVCMAS",
    columns=CHAINING,
    kinds=("accuracy",),
    command=_CHAINING.replace("BENCH", "mmlu"),
    footer=_chaining_footer,
)
def chaining_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Two rows per benchmark and setting; those with one of the two only are left out."""
    pairs: dict[_Pair, dict[bool, list[Run]]] = defaultdict(dict)
    for cell, repeats in grouped(_of_kvcmas(runs)).items():
        info = repeats[0].info
        chained = info.settings.get("chained")
        if isinstance(chained, bool):
            held = _tau(repeats[0]) if info.target_rho is None else info.target_rho
            pair = _Pair(
                cell.bench,
                _others(repeats[0]),
                held,
                info.target_rho is None,
                cell.pool_state,
                cell.n,
            )
            pairs[pair][chained] = repeats
    rows = []
    for pair, both in pairs.items():
        if len(both) < 2:
            continue
        own = {chained: scores(repeats) for chained, repeats in both.items()}
        difference, n_paired = difference_cells(own[True], own[False], "chained_points")
        rows.append(_half(pair, "non-chained", both[False], own[False]))
        rows.append(
            {
                **_half(pair, "chained", both[True], own[True]),
                **difference,
                "n_paired": n_paired or None,
            }
        )
    return pd.DataFrame(rows, columns=[name for c in CHAINING for name in c.frame_names])


class _Pair(NamedTuple):
    """What a chained and a non-chained run share: a reuse ratio, or else a threshold."""

    bench: str
    variant: str
    held: float
    by_threshold: bool
    pool_state: str
    n: int


def _half(
    pair: _Pair, name: str, runs: Sequence[Run], own: Mapping[str, float]
) -> dict[str, object]:
    turns = [turn for run in runs for turn in run.turns]
    return {
        "bench": pair.bench,
        "correction": name,
        "variant": pair.variant,
        "tau": _tau(runs[0]),
        "rho_entry": stats.rho(turns, "entry"),
        "n": len(own),
        **accuracy_cells(own),
    }


def _of_kvcmas(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.info.method == "kvcmas" and gated(run)]


def _tau(run: Run) -> float:
    tau = run.info.settings.get("tau")
    return float(tau) if isinstance(tau, int | float) else float("nan")


def _others(run: Run) -> str:
    """The variant without what the table itself shows; ``rho=`` goes with the threshold."""
    shown = ("tau=", "chained=", "rho=")
    parts = [part for part in run.info.label.split() if not part.startswith(shown)]
    return " ".join(parts)
