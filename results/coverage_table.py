"""Table 2: share of the reuse error that selective recomputation removes (paper A.1)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from results.analysis import Analysis
from results.analysis_summary import coverage_summary
from results.benches import bench_order
from results.tables import Column, register_analysis

COLUMNS = (
    Column("bench", "Bench", "string"),
    Column("unit", "Unit", "string"),
    Column("criterion", "Selection", "string"),
    Column("rho", "rho", digits=2),
    Column("turns", "Turns", "Int64"),
    Column("budget", "Budget", digits=3),
    Column("coverage_energy", "Coverage [95% CI]", digits=3, interval=True),
    Column("relative_energy", "Relative [95% CI]", digits=2, interval=True),
    Column("coverage_norm", "Coverage of norms [95% CI]", digits=3, interval=True),
    Column("relative_norm", "Relative of norms [95% CI]", digits=2, interval=True),
)


@register_analysis(
    "2",
    title="share of the reuse error that a selection removes",
    columns=COLUMNS,
    analysis="coverage",
    command="repro analyze coverage --bench BENCH",
)
def build(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """One row per benchmark, unit, criterion and reuse ratio."""
    frames = [
        coverage_summary(analysis.frame).assign(bench=analysis.provenance.get("bench", ""))
        for analysis in sorted(analyses, key=lambda a: bench_order(a.provenance.get("bench", "")))
    ]
    return pd.concat(frames, ignore_index=True)
