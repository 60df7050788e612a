"""What accuracy runs answer, question by question: the cells that several tables share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from results import stats
from results.benches import bench_order
from results.comparable import check_repetitions
from results.names import method_order
from results.records import Run
from results.tables import Column

BASELINE = "nonshared"
FLOOR = "fullshared"
BOOTSTRAP_SEED = 0

ACCURACY = Column("accuracy_percent", "Accuracy % [95% CI]", digits=1, interval=True)
DIFFERENCE = Column("difference_points", "vs NonShared [95% CI]", digits=1, interval=True)
INTERVALS = (
    "accuracy: Wilson interval over distinct questions; difference: paired bootstrap over the "
    f"questions both answered, seed {BOOTSTRAP_SEED}"
)


class Cell(NamedTuple):
    """What one row stands for; its runs differ in the seed (the order of samples) alone."""

    bench: str
    method: str
    label: str
    pool_state: str
    n: int


def grouped(runs: Sequence[Run]) -> dict[Cell, list[Run]]:
    """Runs that repeat one another, in the order of the paper's tables.

    Raises TableError for runs that claim the same cell and are no repetitions.
    """
    cells: dict[Cell, list[Run]] = defaultdict(list)
    for run in runs:
        info = run.info
        cells[Cell(info.bench, info.method, info.label, info.pool_state, info.n)].append(run)
    for repeats in cells.values():
        check_repetitions(repeats)
    ordered = sorted(
        cells, key=lambda cell: (bench_order(cell.bench), method_order(cell.method), cell)
    )
    return {cell: cells[cell] for cell in ordered}


def gated(run: Run) -> bool:
    """Whether a gate decided; where every correction is accepted, its threshold plays no part."""
    return not run.info.label.endswith("accept all")


def scores(runs: Sequence[Run]) -> dict[str, float]:
    """Per question, the share of repetitions that answered it correctly."""
    answers: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for sample in run.samples:
            if sample.correct is not None:
                answers[sample.sample_id].append(float(sample.correct))
    return {sample_id: stats.mean(values) for sample_id, values in answers.items()}


def baseline_scores(runs: Sequence[Run], method: str = BASELINE) -> dict[str, dict[str, float]]:
    """Scores of NonShared, or of another method at its defaults, per benchmark."""
    exact: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.info.method == method:
            exact[run.info.bench].append(run)
    return {bench: scores(repeats) for bench, repeats in exact.items()}


def accuracy_cells(own: Mapping[str, float]) -> dict[str, float]:
    """The cells of ``ACCURACY`` in percent."""
    low, high = stats.wilson_interval(sum(own.values()), len(own))
    return {
        "accuracy_percent": 100 * stats.mean(list(own.values())),
        "accuracy_percent_low": 100 * low,
        "accuracy_percent_high": 100 * high,
    }


def difference_cells(
    own: Mapping[str, float], other: Mapping[str, float], name: str = DIFFERENCE.name
) -> tuple[dict[str, float], int]:
    """Own minus other scores in points, over the questions both answered; and their number."""
    common = [key for key in own if key in other]
    difference = stats.paired_bootstrap(
        [100 * own[key] for key in common],
        [100 * other[key] for key in common],
        seed=BOOTSTRAP_SEED,
    )
    cells = dict(zip((name, f"{name}_low", f"{name}_high"), difference, strict=True))
    return cells, len(common)
