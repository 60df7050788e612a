"""Figures 12 and 13: what a single stream costs, by context and method, and over the ranks.

Shapes differ in model and scale, so that no line joins them: a column of Figure 12 is one shape,
and compares within itself only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from plots.style import GREY, WIDTH, look, save, small_print, styled
from results.errors import ResultsError
from results.names import display_name, method_order
from results.records import Run
from results.stats import Estimate
from results.stream import StreamCell, stream_cells, usual
from results.stream_quality import Variant, quality, variant_of

# The paper compares selective methods at the first ratio with delta methods at the second.
_PAIRS: Final = ((0.9, 0.8), (0.8, 0.6))
_DELTA: Final = ("graphflow", "kvcomm", "kvcmas")
_TEXT: Final = (
    "Single stream; TTFT over the reuse requests, tokens of all prompts and outputs over end-to-end"
    " seconds, memory as bytes of live objects. Bars: 95% intervals, bootstrap over workflows."
)


class _Measure(NamedTuple):
    """One row of panels."""

    name: str
    value: Callable[[StreamCell], Estimate]


_COSTS: Final = (
    _Measure("TTFT, s", lambda cell: cell.ttft()),
    _Measure("tokens/s", lambda cell: cell.throughput()),
    _Measure("held, GB", lambda cell: _exact((cell.held_bytes or math.nan) / 1e9)),
)
_QUALITY: Final = (
    ("MMLU, %", "accuracy_percent"),
    ("first-token KL, nats", "kl_first_nats"),
    ("V error", "v_error"),
)


def figure12(runs: Sequence[Run], out: Path) -> list[Path]:
    """TTFT, throughput and memory by shape, at matched ratios; returns the paths of ``figure12``.

    Raises:
        ResultsError: no shape was run with KVCMAS and another method.
    """
    shapes = _shapes(runs)
    if not shapes:
        raise ResultsError("no single stream of several methods; made by: repro stream")
    with styled():
        figure = Figure(figsize=(WIDTH, 1.5 * len(_COSTS) + 1.3), layout="constrained")
        panels = figure.subplots(len(_COSTS), len(shapes), squeeze=False)
        for column, cells in enumerate(shapes):
            for axes, measure in zip(panels[:, column], _COSTS, strict=True):
                _compare(axes, cells, measure)
            panels[0, column].set_title(_title(cells[0]), loc="left")
        for axes, measure in zip(panels[:, 0], _COSTS, strict=True):
            axes.set_ylabel(measure.name)
        _legend(figure, [cell for cells in shapes for cell in cells])
        small_print(figure, (*_origins(shapes), _TEXT))
        return save(figure, out, "figure12")


def figure13(runs: Sequence[Run], out: Path) -> list[Path]:
    """Quality and cost over the ranks of base and delta; returns the paths of ``figure13``.

    Raises:
        ResultsError: fewer than two pairs of ranks were run on one shape.
    """
    cells = rank_cells(runs)
    if not cells:
        raise ResultsError("no ranks to compare; made by: repro stream --study ranks")
    found = quality(runs, [*map(variant_of, cells), ("nonshared", frozenset[str]())])
    with styled():
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        upper, lower = figure.subplots(2, 3)
        for axes, (name, column) in zip(upper, _QUALITY, strict=True):
            values = [_looked_up(found.rows, variant_of(cell), column) for cell in cells]
            _over_ranks(axes, cells, values, name)
        for axes, measure in zip(lower, _COSTS, strict=True):
            _over_ranks(axes, cells, [measure.value(cell) for cell in cells], measure.name)
        for axes in lower:
            axes.set_xlabel("ranks of base, delta")
            axes.set_ylim(bottom=0)
        small_print(figure, (*_origins([cells]), *found.notes, _TEXT))
        return save(figure, out, "figure13")


def rank_cells(runs: Sequence[Run]) -> list[StreamCell]:
    """KVCMAS over pairs of ranks on the shape that has most of them, the lowest first."""
    groups: dict[tuple[object, ...], list[StreamCell]] = {}
    for cell in stream_cells(run for run in runs if run.info.kind == "stream"):
        if cell.method == "kvcmas" and cell.differs_in <= {"rank_base", "rank_delta", "rho"}:
            key = (*cell.shape, cell.run.info.model, cell.info.rho)
            groups.setdefault(key, []).append(cell)
    best = max(groups.values(), key=len, default=[])
    return sorted(best, key=_ranks) if len(best) > 1 else []


def _ranks(cell: StreamCell) -> tuple[float, float]:
    """Ranks of base and delta; no limit counts as infinity."""
    return _rank(cell, "rank_base"), _rank(cell, "rank_delta")


def _rank(cell: StreamCell, name: str) -> float:
    value = cell.run.info.settings[name]
    return float(value) if isinstance(value, int) else math.inf


def _shapes(runs: Sequence[Run]) -> list[list[StreamCell]]:
    """Per model and context the shape with most methods, if KVCMAS is one of several."""
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[StreamCell]]] = {}
    for cell in usual(stream_cells(run for run in runs if run.info.kind == "stream")):
        info, run = cell.info, cell.run.info
        if (info.agents, info.rounds) == (3, 1):
            place = (info.shared_tokens, run.hardware, run.model)
            groups.setdefault(place, {}).setdefault((cell.shape, info.scale), []).append(cell)
    best = [max(groups[key].values(), key=len) for key in sorted(groups, key=str)]
    chosen = [g for g in best if {"kvcmas"} < {c.method for c in g if c.turns}]
    return sorted(chosen, key=lambda group: (group[0].info.shared_tokens, _title(group[0])))


def _compare(axes: Axes, cells: Sequence[StreamCell], measure: _Measure) -> None:
    """Methods side by side, one group per pair of ratios."""
    methods = sorted({cell.method for cell in cells}, key=method_order)
    width = 0.8 / len(methods)
    groups = [pair for pair in _PAIRS if any(_varies(c) and _in_pair(c, pair) for c in cells)]
    for at, pair in enumerate(groups):
        for cell in cells:
            if not _in_pair(cell, pair):
                continue
            x = at + width * (methods.index(cell.method) - (len(methods) - 1) / 2)
            _point(axes, x, cell, measure)
    axes.set_xticks(range(len(groups)), [f"rho {s:g} | {d:g}" for s, d in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(bottom=0)


def _varies(cell: StreamCell) -> bool:
    return cell.info.rho_kind not in ("none", "all")


def _in_pair(cell: StreamCell, pair: tuple[float, float]) -> bool:
    """Whether a cell is compared at these ratios; NonShared and FullShared have none."""
    if not _varies(cell):
        return True
    usual_variant = cell.differs_in == {"rho"}
    return usual_variant and cell.info.rho == pair[cell.method in _DELTA]


def _point(axes: Axes, x: float, cell: StreamCell, measure: _Measure) -> None:
    style = look(cell.method)
    if cell.info.out_of_memory:
        text = f"OOM, {cell.info.memory_needed_bytes / 1e9:.1f} GB"
        axes.text(
            x,
            0.02,
            text,
            transform=axes.get_xaxis_transform(),
            rotation=90,
            color=style.colour,
            fontsize=5.5,
            ha="center",
            va="bottom",
        )
        return
    value, low, high = measure.value(cell)
    if not math.isnan(low):
        axes.vlines(x, low, high, color=style.colour, linewidth=1.2, alpha=0.7)
    axes.plot([x], [value], marker=style.marker, color=style.colour, linestyle="")


def _over_ranks(
    axes: Axes, cells: Sequence[StreamCell], values: Sequence[Estimate], name: str
) -> None:
    colour = look("kvcmas").colour
    known = [(i, value) for i, value in enumerate(values) if not math.isnan(value.value)]
    for i, value in known:
        default = _ranks(cells[i]) == (32, 32)
        if not math.isnan(value.low):
            axes.vlines(i, value.low, value.high, color=colour, linewidth=1)
        axes.plot([i], [value.value], marker="*" if default else "o", color=colour, linestyle="")
    if not known:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, color=GREY, ha="center")
    names = [", ".join("full" if math.isinf(r) else f"{r:g}" for r in _ranks(c)) for c in cells]
    axes.set_xticks(range(len(cells)), names, rotation=60, fontsize=6)
    axes.set_xlim(-0.5, len(cells) - 0.5)
    axes.set_title(name, loc="left")


def _looked_up(rows: dict[Variant, dict[str, float]], variant: Variant, column: str) -> Estimate:
    row = rows.get(variant, {})
    return Estimate(
        *(row.get(key, math.nan) for key in (column, f"{column}_low", f"{column}_high"))
    )


def _exact(value: float) -> Estimate:
    return Estimate(value, math.nan, math.nan)


def _title(cell: StreamCell) -> str:
    info = cell.info
    scaled = "" if info.scale == 1 else f" / {info.scale:g}"
    return f"{info.shared_tokens // 1024}K{scaled}\n{cell.run.info.model}"


def _legend(figure: Figure, cells: Sequence[StreamCell]) -> None:
    methods = sorted({cell.method for cell in cells}, key=method_order)
    handles = [
        Line2D([], [], linestyle="", marker=look(m).marker, color=look(m).colour) for m in methods
    ]
    names = [display_name(method) for method in methods]
    figure.legend(handles, names, loc="outside upper left", ncols=5, frameon=False, fontsize=7)


def _origins(shapes: Sequence[Sequence[StreamCell]]) -> list[str]:
    """What ran where."""
    lines = []
    for cells in shapes:
        info, run = cells[0].info, cells[0].run.info
        n = max(len(cell.later) for cell in cells)
        lines.append(
            f"{run.bench}: {run.model}, {run.dtype}, {run.hardware}, {info.load}, layout"
            f" {info.layout}, n = {n} reuse requests a cell"
        )
    return list(dict.fromkeys(lines))


FIGURES = {"12": figure12, "13": figure13}
