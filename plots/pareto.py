"""Figure 4: accuracy against latency of every method, with the span from FullShared to NonShared.

Drawn from the rows of Table 1. Latency is single stream. The panel's limits follow the span; what
lies outside is put on the border, with its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Final, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from plots.style import GREY, WIDTH, look, save, small_print, styled
from results.benches import bench_name, bench_order
from results.errors import ResultsError
from results.names import METHODS
from results.records import Run
from results.tables import build_table, provenance

# How far a panel reaches beyond the span of FullShared and NonShared, in spans.
_MARGIN: Final = 0.75
# Least span: points of accuracy; share of the latency.
_LEAST_POINTS, _LEAST_SHARE = 4.0, 0.1
_LINE_SHARE: Final = 0.08  # of a panel's height, for a written value
_TITLE: Final = 40  # characters that fit a panel
_TEXT: Final = (
    "Latency: end-to-end seconds of a trajectory, one request after another (the paper: 1 QPS)."
    " Shaded: span from FullShared to NonShared; upper left is better. A triangle on the border is"
    " a result outside, with its value. Line: results that no other beats in both. Vertical bars:"
    " Wilson 95% intervals over questions, cut at the border."
)
_NAMES: Final = {shown: name for name, shown in METHODS.items()}


class _Point(NamedTuple):
    method: str
    label: str
    hollow: bool  # another variant of its method comes before it
    latency: float
    accuracy: float
    low: float
    high: float


class _Limits(NamedTuple):
    left: float
    right: float
    bottom: float
    top: float

    def nearest(self, point: _Point) -> tuple[float, float]:
        """Where a point is drawn: at its place, or on the border nearest to it."""
        x = min(max(point.latency, self.left), self.right)
        return x, min(max(point.accuracy, self.bottom), self.top)


def figure4(runs: Sequence[Run], out: Path) -> list[Path]:
    """Draw one panel per benchmark and setting; returns the paths of ``figure4``.

    Raises:
        ResultsError: no accuracy run has a sample, or runs cannot share a table.
    """
    table_runs = [run for run in runs if run.info.kind == "accuracy"]
    frame = build_table("1", table_runs).frame.dropna(subset=["accuracy_percent", "latency_s"])
    if frame.empty:
        raise ResultsError("no accuracy run to draw; made by: repro accuracy --bench BENCH")
    if "setting" not in frame:
        frame = frame.assign(setting="")
    pairs = frame[["setting", "bench"]].drop_duplicates().itertuples(index=False)
    panels = sorted(
        ((str(setting), str(bench)) for setting, bench in pairs), key=lambda p: bench_order(p[1])
    )
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with styled():
        figure = Figure(figsize=(WIDTH, 2.3 * rows + 1.5), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        drawn: dict[str, Line2D] = {}
        benches = [bench for _, bench in panels]
        for axes, (setting, bench) in zip(grid, panels, strict=False):
            part = frame[(frame["setting"] == setting) & (frame["bench"] == bench)]
            points = _points(part)
            title = [f"{bench_name(bench)}, n = {part['n'].max()}"]
            title += wrap(setting, _TITLE) if benches.count(bench) > 1 else []
            axes.set_title("\n".join(title), loc="left")
            axes.set(xlabel="latency, s", ylabel="accuracy, %")
            _panel(axes, points, _limits(points))
            drawn |= {point.label: _key(point) for point in points}
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        figure.legend(
            list(drawn.values()),
            list(drawn),
            loc="outside upper left",
            ncols=4,
            fontsize=7,
            frameon=False,
        )
        small_print(figure, (*provenance(table_runs), _TEXT))
        return save(figure, out, "figure4")


FIGURES: Final = {"4": figure4}


def _key(point: _Point) -> Line2D:
    """What stands for a point in the legend."""
    style = look(point.method)
    face = _face(point)
    return Line2D(
        [], [], linestyle="", color=style.colour, marker=style.marker, markerfacecolor=face
    )


def _face(point: _Point) -> str:
    return "white" if point.hollow else look(point.method).colour


def _points(frame: pd.DataFrame) -> list[_Point]:
    points: list[_Point] = []
    for _, row in frame.iterrows():
        method = _NAMES.get(row["method"], row["method"])
        points.append(
            _Point(
                method=method,
                label=" ".join(part for part in (row["method"], row["variant"]) if part),
                hollow=any(point.method == method for point in points),
                latency=float(row["latency_s"]),
                accuracy=float(row["accuracy_percent"]),
                low=float(row["accuracy_percent_low"]),
                high=float(row["accuracy_percent_high"]),
            )
        )
    return points


def _limits(points: Sequence[_Point]) -> _Limits:
    """The span of the two reference methods with a margin; of all points where one is missing."""
    references = [p for p in points if p.method in ("nonshared", "fullshared")]
    span = references if len({p.method for p in references}) == 2 else points
    left, right = min(p.latency for p in span), max(p.latency for p in span)
    bottom, top = min(p.accuracy for p in span), max(p.accuracy for p in span)
    wide = _MARGIN * max(right - left, _LEAST_SHARE * right)
    high = _MARGIN * max(top - bottom, _LEAST_POINTS)
    return _Limits(max(0.0, left - wide), right + wide, max(0.0, bottom - high), top + high)


def _panel(axes: Axes, points: Sequence[_Point], limits: _Limits) -> None:
    axes.set(xlim=(limits.left, limits.right), ylim=(limits.bottom, limits.top))
    by_method = {p.method: p for p in points}
    if {"nonshared", "fullshared"} <= by_method.keys():
        dense, reused = by_method["nonshared"], by_method["fullshared"]
        axes.add_patch(
            Rectangle(
                (min(dense.latency, reused.latency), min(dense.accuracy, reused.accuracy)),
                abs(dense.latency - reused.latency),
                abs(dense.accuracy - reused.accuracy),
                color=GREY,
                alpha=0.15,
                linewidth=0,
            )
        )
    front = _front(points)
    axes.plot([p.latency for p in front], [p.accuracy for p in front], color=GREY, linewidth=0.8)
    written: list[float] = []  # where values stand; those at one height go one above another
    line = _LINE_SHARE * (limits.top - limits.bottom)
    for point in points:
        x, y = limits.nearest(point)
        _draw(axes, point, limits, sum(abs(y - height) < line for height in written))
        if (x, y) != (point.latency, point.accuracy):
            written.append(y)


def _front(points: Sequence[_Point]) -> list[_Point]:
    """Points that no other beats in latency and accuracy at once, from left to right."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.latency, -p.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front


def _draw(axes: Axes, point: _Point, limits: _Limits, level: int) -> None:
    """A point with its interval, or a triangle on the border with the value that lies outside.

    ``level`` counts the lines that values of other points take there already.
    """
    style = look(point.method)
    x, y = limits.nearest(point)
    marker = style.marker if (x, y) == (point.latency, point.accuracy) else _towards(point, limits)
    if x == point.latency:
        axes.vlines(x, point.low, point.high, color=style.colour, linewidth=0.6, alpha=0.5)
    axes.plot(
        x,
        y,
        color=style.colour,
        marker=marker,
        markerfacecolor=_face(point),
        linestyle="",
        clip_on=False,
        zorder=3,
    )
    values = [f"{point.latency:.1f} s"] if x != point.latency else []
    values += [f"{point.accuracy:.1f}%"] if y != point.accuracy else []
    right, upper = x > (limits.left + limits.right) / 2, y > (limits.bottom + limits.top) / 2
    axes.annotate(
        ", ".join(values),
        (x, y),
        xytext=(-6 if right else 6, -3 - 7 * level if upper else 4 + 7 * level),
        textcoords="offset points",
        ha="right" if right else "left",
        va="top" if upper else "bottom",
        fontsize=6.5,
        color=style.colour,
        annotation_clip=False,
    )


def _towards(point: _Point, limits: _Limits) -> str:
    """The triangle that points to where the result lies."""
    if point.latency > limits.right:
        return ">"
    if point.latency < limits.left:
        return "<"
    return "^" if point.accuracy > limits.top else "v"
