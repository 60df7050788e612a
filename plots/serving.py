"""Figures of serving under load: TTFT over request rates (5, 6 and 8 to 11).

Each is drawn from real cells; ``5-emulated`` and ``5-modelled`` from the others alone, and say so.
A column is a context (or a length of agent outputs), a row a reuse ratio. Rates are set apart
evenly, because they double from one to the next and begin at 0, a single stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from plots.style import GREY, METHODS, WIDTH, Look, look, save, small_print, styled
from results.comparable import split_settings
from results.errors import ResultsError
from results.names import display_name
from results.records import Run
from results.serving import (
    ServedCell,
    in_comparison,
    of_mode,
    ratios_of,
    served_cells,
    speed_up,
)

# The law under which the paper's serving claims are judged; another one only if it is all there is.
_LAW: Final = "even"
_USUAL_OUTPUT: Final = 128
_TEXT: Final = (
    "Bars: 95% intervals, bootstrap over workflows. Seconds on a logarithmic axis. Grey:"
    " NonShared's TTFT over KVCMAS's at the highest rate, and KVCMAS's work bound."
)
# A star of the common size is hard to see.
_STAR_SIZE: Final = 7.5


class _Line(NamedTuple):
    """One line of a panel: its name, how it is drawn, which cells belong to it."""

    name: str
    look: Look
    takes: Callable[[ServedCell], bool]


@dataclass(frozen=True)
class _Sheet:
    """What a figure shows.

    Attributes:
        q: percentile of TTFT.
        column: what sets a panel's column apart, in the order of columns.
        title: of a column, from a cell in it.
        lines: of the cells.
    """

    q: float
    column: Callable[[ServedCell], tuple[float, ...]]
    title: Callable[[ServedCell], str]
    lines: Callable[[Sequence[ServedCell]], list[_Line]]


def _draw_of(
    mode: str, draw: Callable[[str, Sequence[Run], Path, float], list[Path]], number: str, q: float
) -> Callable[[Sequence[Run], Path], list[Path]]:
    """A figure of the cells of one mode; raises ResultsError if there are none to draw."""
    name = f"figure{number}" if mode == "real" else f"figure{number}-{mode}"
    return lambda runs, out: draw(name, of_mode(runs, mode), out, q)


def _contexts(name: str, runs: Sequence[Run], out: Path, q: float) -> list[Path]:
    cells = [
        cell
        for cell in _cells(runs)
        if cell.serve.output_tokens <= _USUAL_OUTPUT and not _non_chained(cell)
    ]
    sheet = _Sheet(q, _by_context, _context_title, _method_lines)
    return _draw(name, cells, out, sheet)


def _outputs(name: str, runs: Sequence[Run], out: Path, q: float) -> list[Path]:
    cells = [cell for cell in _cells(runs) if not _non_chained(cell)]
    long = [cell for cell in cells if cell.serve.output_tokens > _USUAL_OUTPUT]
    shared = {cell.serve.shared_tokens for cell in long}
    cells = [cell for cell in cells if cell.serve.shared_tokens in shared]
    sheet = _Sheet(q, _by_output, _output_title, _method_lines)
    return _draw(name, cells, out, sheet)


def _chaining(name: str, runs: Sequence[Run], out: Path, q: float) -> list[Path]:
    cells = [
        cell
        for cell in _cells(runs)
        if cell.serve.output_tokens <= _USUAL_OUTPUT and cell.key.method in ("nonshared", "kvcmas")
    ]
    ratios = {cell.key.rho for cell in cells if _non_chained(cell)}
    cells = [cell for cell in cells if cell.key.rho in ratios or cell.key.method == "nonshared"]
    sheet = _Sheet(q, _by_context, _context_title, _chaining_lines)
    return _draw(name, cells, out, sheet)


def _by_context(cell: ServedCell) -> tuple[float, ...]:
    return cell.serve.shared_tokens, cell.serve.scale


def _by_output(cell: ServedCell) -> tuple[float, ...]:
    return cell.serve.output_tokens, cell.serve.scale


def _cells(runs: Sequence[Run]) -> list[ServedCell]:
    """Cells of one setting under one law."""
    groups = list(split_settings(runs))
    if len(groups) > 1:
        labels = "; ".join(label for label, _ in groups)
        raise ResultsError(f"these runs cannot share a figure, choose some of them: {labels}")
    cells = served_cells(runs)
    laws = {cell.serve.arrival for cell in cells}
    law = _LAW if _LAW in laws else min(laws, default=_LAW)
    return [cell for cell in cells if cell.serve.arrival == law]


def _draw(name: str, cells: Sequence[ServedCell], out: Path, sheet: _Sheet) -> list[Path]:
    columns = sorted({sheet.column(cell) for cell in cells})
    ratios = ratios_of(cells)
    if not ratios or all(math.isnan(cell.ttft(sheet.q).value) for cell in cells):
        raise ResultsError(
            f"no serving cell for {name}: it needs methods at a reuse ratio"
            + (" and 40 requests a cell for p90" if sheet.q > 50 else "")
        )
    with styled():
        figure = Figure(figsize=(WIDTH, 2.1 * len(ratios) + 0.95), layout="constrained")
        panels = figure.subplots(len(ratios), len(columns), squeeze=False, sharey="row")
        for row, rho in zip(panels, ratios, strict=True):
            for axes, column in zip(row, columns, strict=True):
                group = [c for c in in_comparison(cells, rho) if sheet.column(c) == column]
                _panel(axes, group, sheet)
            row[0].set_ylabel(f"rho {_ratio_text(cells, rho)}\np{sheet.q:g} TTFT, s")
        for row in panels:
            low, high = row[0].get_ylim()
            row[0].set_ylim(low * (low / high) ** 0.15, high)  # room for the notes
        for axes in panels[-1]:
            axes.set_xlabel("agent requests/s (QPS)")
        _legend(figure, sheet.lines(cells))
        small_print(figure, [_origin(cells), _TEXT])
        if (mode := cells[0].serve.mode) != "real":
            figure.text(0.994, 0.99, mode.upper(), ha="right", va="top", weight="bold")
        return save(figure, out, name)


def _panel(axes: Axes, cells: Sequence[ServedCell], sheet: _Sheet) -> None:
    rates = sorted({cell.serve.qps for cell in cells})
    lines = sheet.lines(cells)
    # Side by side, so that intervals can be told apart; a single rate has all the room.
    apart = (0.9 if len(rates) == 1 else 0.2) / max(1, len(lines))
    for place, line in enumerate(lines):
        aside = apart * (place - (len(lines) - 1) / 2)
        own = sorted((c for c in cells if line.takes(c)), key=lambda cell: cell.serve.qps)
        answered = [cell for cell in own if cell.requests]
        points = [(rates.index(c.serve.qps) + aside, c.ttft(sheet.q)) for c in answered]
        if points:
            x = [at for at, _ in points]
            value, low, high = np.array([estimate for _, estimate in points]).T
            axes.vlines(x, low, high, color=line.look.colour, linewidth=1, alpha=0.6)
            axes.plot(x, value, **_drawn(line.look))
    _notes(axes, cells, sheet, rates)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_xlim(-0.5, len(rates) - 0.5)
    if cells:
        axes.set_title(sheet.title(cells[0]), loc="left")


def _headline(cells: Sequence[ServedCell], qps: float, q: float) -> str:
    """KVCMAS's speed-up at the highest rate and its bound, where both were measured."""
    own = next(
        (c for c in cells if c.key.method == "kvcmas" and c.serve.qps == qps and c.requests), None
    )
    if own is None or math.isnan(gain := speed_up(own, cells, q).value):
        return ""
    bound = own.serve.work_bound
    return f"{gain:.2f}x" + ("" if bound is None else f", bound {bound:.2f}x")


def _notes(axes: Axes, cells: Sequence[ServedCell], sheet: _Sheet, rates: Sequence[float]) -> None:
    """In the lower right corner, where lines that rise to the right leave room."""
    notes = []
    for line in sheet.lines(cells):
        own = [cell for cell in cells if line.takes(cell)]
        if own and all(cell.out_of_memory for cell in own):
            needed = max(cell.serve.memory_needed_bytes for cell in own) / 1e9
            notes.append((f"{line.name}: out of memory, {needed:.3g} GB", line.look.colour))
    if rates and (headline := _headline(cells, rates[-1], sheet.q)):
        notes.insert(0, (headline, GREY))
    for row, (text, colour) in enumerate(notes):
        axes.text(
            *(0.99, 0.03 + 0.08 * row),
            text,
            transform=axes.transAxes,
            fontsize=6.5,
            color=colour,
            ha="right",
        )


def _legend(figure: Figure, lines: Sequence[_Line]) -> None:
    handles = [
        figure.axes[0].plot([], [], label=line.name, **_drawn(line.look))[0] for line in lines
    ]
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=min(4, len(handles)),
        frameon=False,
        fontsize=7,
        handlelength=2.5,
        columnspacing=2,
    )


def _drawn(own: Look) -> dict[str, Any]:
    """Keyword arguments of ``Axes.plot``."""
    size = {"markersize": _STAR_SIZE} if own.marker == "*" else {}
    return {**own.plot(), **size, "markeredgecolor": "white", "markeredgewidth": 0.4}


def _method_lines(cells: Sequence[ServedCell]) -> list[_Line]:
    """One line per method at its default variant; variants of a method are dotted."""
    lines = []
    for method, label in dict.fromkeys((cell.key.method, cell.key.label) for cell in cells):
        own = look(method)
        lines.append(
            _Line(
                f"{display_name(method)} {label.replace('_', ' ')}".strip(),
                Look(own.colour, own.marker, ":") if label else own,
                partial(_is, (method, label)),
            )
        )
    return lines


def _is(variant: tuple[str, str], cell: ServedCell) -> bool:
    return (cell.key.method, cell.key.label) == variant


def _chaining_lines(cells: Sequence[ServedCell]) -> list[_Line]:
    blue = "#0072b2"
    kinds = (
        _Line("NonShared", METHODS["nonshared"], lambda cell: cell.key.method == "nonshared"),
        _Line("chained", METHODS["kvcmas"], lambda cell: _source(cell) == "chained"),
        _Line("non-chained", Look(blue, "s"), lambda cell: _source(cell) == "corrected"),
        _Line(
            "non-chained, first turn dense",
            Look(blue, "s", ":"),
            lambda cell: _source(cell) == "dense",
        ),
    )
    return [line for line in kinds if any(map(line.takes, cells))]


def _source(cell: ServedCell) -> str | None:
    """``chained``, or what the non-chained variant does in the first turn; None for others."""
    if cell.key.method != "kvcmas":
        return None
    if not _non_chained(cell):
        return "chained"
    return str(cell.runs[0].info.settings.get("first_turn"))


def _non_chained(cell: ServedCell) -> bool:
    return cell.key.method == "kvcmas" and not cell.runs[0].info.settings.get("chained", True)


def _context_title(cell: ServedCell) -> str:
    scale = "" if cell.serve.scale == 1 else f" / {cell.serve.scale:g}"
    return f"{_tokens(cell.serve.shared_tokens)}{scale} shared"


def _output_title(cell: ServedCell) -> str:
    scale = "" if cell.serve.scale == 1 else f" / {cell.serve.scale:g}"
    generated = (cell.serve.agents - 1) * cell.serve.output_tokens
    return f"{_tokens(generated)}{scale} generated"


def _tokens(tokens: int) -> str:
    return f"{tokens / 1024:.3g}K" if tokens >= 1024 / 4 else str(tokens)


def _ratio_text(cells: Sequence[ServedCell], rho: float) -> str:
    selective = {
        cell.serve.rho_method
        for cell in in_comparison(cells, rho)
        if cell.key.rho_kind == "budget" and cell.serve.rho_method is not None
    }
    own = f" (selective {', '.join(f'{ratio:g}' for ratio in sorted(selective))})"
    return f"{rho:g}" + (own if selective else "")


def _origin(cells: Sequence[ServedCell]) -> str:
    """What was served on what."""
    info, serve = cells[0].runs[0].info, cells[0].serve
    requests = sorted({len(cell.requests) for cell in cells} - {0})
    scales = sorted({cell.serve.time_scale for cell in cells})
    return (
        f"{serve.mode}; layout {serve.layout}; {info.model}@{(info.model_revision or '')[:10]},"
        f" {info.dtype}, {info.engine}, {info.hardware}; arrivals {serve.arrival}, {serve.clock}"
        f" clock; n = {', '.join(map(str, requests))} requests a cell; rates in seconds of the"
        f" paper's GPU (time scale {', '.join(f'{scale:.3g}' for scale in scales)})."
    )


_DRAWN: Final = {
    "5": (_contexts, 50),
    "8": (_contexts, 90),
    "6": (_chaining, 50),
    "9": (_chaining, 90),
    "10": (_outputs, 50),
    "11": (_outputs, 90),
}
FIGURES: Final = {
    number if mode == "real" else f"{number}-{mode}": _draw_of(mode, draw, number, q)
    for mode in ("real", "emulated", "modelled")
    for number, (draw, q) in _DRAWN.items()
}
