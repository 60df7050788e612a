"""Figure 4-thresholds: the reuse ratio over the gate's threshold, for each quarter of the requests.

Not in the paper. A threshold is found on other requests, while pools go on changing: the curves
show whether one threshold holds the ratio from the first request to the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.style import GREY, WIDTH, Label, label_ends, look, save, small_print, styled
from results.accuracy import Cell, gated, grouped
from results.benches import bench_name, bench_order
from results.comparable import split_settings
from results.errors import ResultsError
from results.gates import QUARTERS, THRESHOLDS, by_quarter, held_by
from results.names import display_name
from results.records import Run
from results.tables import provenance

_LINES: Final = (":", "-.", "--", "-")
_LOWEST: Final = 1e-6  # what is below lies on the left border
_COLUMNS: Final = 2
_TITLE: Final = 60  # characters that fit a panel
_TEXT: Final = (
    "Lines: share of the reusable entries that a threshold would hold in each quarter of the"
    " requests, in their order, by the entropies that were recorded under the vertical line's"
    " threshold; under another one pools would hold other anchors. Grey: the target, and the"
    " threshold that held it on the requests set apart to find it."
)


def thresholds(runs: Sequence[Run], out: Path) -> list[Path]:
    """One panel per benchmark and calibrated method.

    Raises:
        ResultsError: no accuracy run of a method with a gate and a target.
    """
    panels = [
        (setting, cell, repeats)
        for setting, group in split_settings([run for run in runs if _calibrated(run)])
        for cell, repeats in grouped(group).items()
        if all(held_by(quarter) for quarter in by_quarter(repeats))
    ]
    if not panels:
        raise ResultsError(
            "no accuracy run whose threshold was found for a reuse ratio; made by: "
            'repro accuracy --bench BENCH --cell "kvcmas rho=0.8" --calibration 20'
        )
    panels.sort(key=lambda panel: bench_order(panel[1].bench))
    drawn = [run for _, _, repeats in panels for run in repeats]
    cells = [cell for _, cell, _ in panels]
    rows = -(-len(panels) // _COLUMNS)
    with styled():
        figure = Figure(figsize=(WIDTH, 2.2 * rows + 0.9), layout="constrained")
        grid = figure.subplots(rows, _COLUMNS, squeeze=False, sharey=True).ravel()
        labels = [
            _panel(axes, cell, repeats, setting if cells.count(cell) > 1 else "")
            for axes, (setting, cell, repeats) in zip(grid, panels, strict=False)
        ]
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        small_print(figure, (*provenance(drawn), _TEXT))
        label_ends(figure, list(zip(grid, labels, strict=False)))
        return save(figure, out, "figure4-thresholds")


FIGURES: Final = {"4-thresholds": thresholds}
TITLES: Final[Mapping[str, str]] = {"4-thresholds": "reuse ratio over the gate's threshold"}


def _calibrated(run: Run) -> bool:
    info = run.info
    known = info.kind == "accuracy" and info.method in THRESHOLDS and gated(run)
    return known and info.target_rho is not None and len(run.samples) >= QUARTERS


def _panel(axes: Axes, cell: Cell, runs: Sequence[Run], told: str) -> list[Label]:
    info = runs[0].info
    colour = look(cell.method).colour
    labels = []
    for number, (turns, line) in enumerate(zip(by_quarter(runs), _LINES, strict=True), start=1):
        points = held_by(turns)
        start = max(rho for threshold, rho in points if threshold <= _LOWEST)
        inside = [point for point in points if _LOWEST < point[0] <= 1]
        x, y = zip((_LOWEST, start), *inside, (1.0, points[-1][1]), strict=True)
        axes.step(x, y, where="post", color=colour, linestyle=line)
        labels.append(Label(y[-1], f"quarter {number}", colour))
    setting = THRESHOLDS[cell.method]
    threshold = float(str(info.settings[setting]))
    axes.axhline(info.target_rho or 0.0, color=GREY, linewidth=0.8)
    axes.axvline(min(max(threshold, _LOWEST), 1.0), color=GREY, linewidth=0.8)
    axes.set(xscale="log", xlim=(_LOWEST, 1), ylim=(0, 1.02))
    axes.set(xlabel=f"{setting}, threshold on the entropy", ylabel="rho (entry)")
    of = f"{bench_name(cell.bench)}, {display_name(cell.method)}, n = {len(runs[0].samples)}"
    lines = (f"{of}: {setting} = {threshold:.3g}", *wrap(told, _TITLE))
    axes.set_title("\n".join(lines), loc="left")
    return labels
