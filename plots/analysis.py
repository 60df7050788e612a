"""Figures of `repro analyze`, drawn from its CSV files: ranks (2 and 7) and chaining (3).

Every function takes one file or more, of different models or benchmarks, and draws rows of panels
for each: keys on the left, values on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from plots.style import GREY, METHODS, WIDTH, Label, label_ends, save, small_print, styled
from results import stats
from results.analysis import ENERGY, LONG, RETAINED, Analysis
from results.analysis_summary import chain_summary, comparable, nodes
from results.errors import ResultsError


class _Line(NamedTuple):
    name: str
    colour: str
    marker: str
    style: str = "-"


_BASE_AND_DELTA: Final = {
    "base": _Line("base", "#0072b2", "s"),
    "delta": _Line("delta", METHODS["kvcmas"].colour, "o"),
}
_PF: Final = {
    "pf_system": _Line("system swapped", "#009e73", "^"),
    "pf_presence": _Line("system vs. BOS", "#882255", "D"),
    "pf_bare": _Line("system vs. nothing", "#cc79a7", "X"),
    "pf_glue": _Line("glue vs. nothing", "#332288", "v"),
}
_CHAIN: Final = {
    ("source", "kvcmas"): _Line("chained", METHODS["kvcmas"].colour, "o"),
    ("context-free", "kvcmas"): _Line("non-chained", "#0072b2", "s"),
    ("source", "none"): _Line("source, plain", METHODS["kvcmas"].colour, "o", ":"),
    ("context-free", "none"): _Line("context-free, plain", "#0072b2", "s", ":"),
}
_PARTS: Final = (("k", "keys"), ("v", "values"))
_RANK_TEXT: Final = (
    f"Effective rank: least rank that keeps {ENERGY:.0%} of the squared singular values. Numbers"
    " are means over layers, bands the middle half of the segments. Where a kind has segments of"
    f" {LONG} tokens or more, only those are drawn: a length bounds the rank."
)
_CHAIN_TEXT: Final = (
    "Error: Frobenius norm of served minus exact cache over that of the exact one; pool warm,"
    " every correction accepted. (a) Segments corrected under both references; (b) also those"
    " nobody held before. Bands and bars: 95% bootstrap intervals over requests."
)


class _Sheet:
    """Rows of two panels with the same lines; only the right one names them.

    Labels and small print are set when everything else is.
    """

    def __init__(self, rows: int, height: float) -> None:
        self._figure = Figure(figsize=(WIDTH, rows * height + 0.4), layout="constrained")
        panels = self._figure.subplots(rows, 2, squeeze=False)
        self.panels: list[list[Axes]] = [list(row) for row in panels]
        self._labels: list[tuple[Axes, list[Label]]] = []
        self._print: list[str] = []

    def label(self, axes: Axes, lines: Sequence[tuple[_Line, float, str]]) -> None:
        """Label lines right of a panel: where each ends and a number about it."""
        named = any(axes is row[-1] for row in self.panels)
        labels = [
            Label(y, f"{line.name} {number}".strip() if named else number, line.colour)
            for line, y, number in lines
        ]
        self._labels.append((axes, labels))

    def note(self, text: str) -> None:
        """A line of small print."""
        self._print.append(text)

    def save(self, out: Path, name: str) -> list[Path]:
        """Finish and write; returns the paths."""
        small_print(self._figure, self._print)
        label_ends(self._figure, self._labels)
        return save(self._figure, out, name)


def figure2(files: Sequence[Path], out: Path) -> list[Path]:
    """Effective rank of base and delta over layers, from ranks.csv files.

    Raises:
        ResultsError: a file that is no ranks.csv, or holds no edge.
    """
    analyses = [Analysis.read(path, "ranks") for path in files]
    with styled():
        sheet = _Sheet(len(analyses), 2.4)
        for analysis, row in zip(analyses, sheet.panels, strict=True):
            frame, tokens = _ranked(analysis, _BASE_AND_DELTA)
            for axes, (part, title) in zip(row, _PARTS, strict=True):
                axes.set_title(_title(title, analysis, analyses), loc="left")
                _rank_panel(sheet, axes, frame[frame["tensor"] == part], _BASE_AND_DELTA, 32)
            _same_top(row, least=36)
            sheet.note(_origin(analysis, tokens))
        sheet.note(_RANK_TEXT)
        return sheet.save(out, "figure2")


def figure3(files: Sequence[Path], out: Path) -> list[Path]:
    """Error of chained and non-chained correction by layer (a) and agent (b), from chain.csv files.

    Raises:
        ResultsError: a file that is no chain.csv, or one where nothing can be compared.
    """
    analyses = [Analysis.read(path, "chain") for path in files]
    with styled():
        sheet = _Sheet(2 * len(analyses), 2.2)
        for n, analysis in enumerate(analyses):
            fair, summary = comparable(analysis.frame), chain_summary(analysis.frame)
            if fair.empty:
                raise ResultsError("no segment was corrected under both references; warm up longer")
            agents = nodes(analysis.frame)
            upper, lower = sheet.panels[2 * n : 2 * n + 2]
            for i, (part, title) in enumerate(_PARTS):
                upper[i].set_title(_title(f"(a) {title} by layer", analysis, analyses), loc="left")
                _chain_layers(sheet, upper[i], fair[fair["tensor"] == part])
                lower[i].set_title(_title(f"(b) {title} by agent", analysis, analyses), loc="left")
                _chain_agents(sheet, lower[i], summary[summary["tensor"] == part], agents)
            sheet.note(
                _origin(analysis, f"{analysis.provenance.get('warm', '?')} warm-up workflows")
            )
        sheet.note(_CHAIN_TEXT)
        return sheet.save(out, "figure3")


def figure7(files: Sequence[Path], out: Path) -> list[Path]:
    """PF-induced deltas from ranks.csv files: effective rank (a), error over retained rank (b).

    Raises:
        ResultsError: a file that is no ranks.csv, or holds no PF-induced delta.
    """
    analyses = [Analysis.read(path, "ranks") for path in files]
    with styled():
        sheet = _Sheet(2 * len(analyses), 2.2)
        for n, analysis in enumerate(analyses):
            frame, tokens = _ranked(analysis, _PF)
            upper, lower = sheet.panels[2 * n : 2 * n + 2]
            for i, (part, title) in enumerate(_PARTS):
                chosen = frame[frame["tensor"] == part]
                upper[i].set_title(_title(f"(a) {title}", analysis, analyses), loc="left")
                _rank_panel(sheet, upper[i], chosen, _PF)
                lower[i].set_title(_title(f"(b) {title}", analysis, analyses), loc="left")
                _retained_panel(sheet, lower[i], chosen)
            _same_top(upper, least=8)
            sheet.note(_origin(analysis, tokens))
        sheet.note(f"{_RANK_TEXT} (b) Numbers are the share of the energy that rank 8 keeps.")
        return sheet.save(out, "figure7")


ANALYSIS_FIGURES: Final = {
    "2": ("ranks", figure2),
    "3": ("chain", figure3),
    "7": ("ranks", figure7),
}


def _ranked(analysis: Analysis, lines: dict[str, _Line]) -> tuple[pd.DataFrame, str]:
    """Rows that have a rank, of long segments where a kind has any, and how long those are.

    A short segment bounds its rank by its length.
    """
    ranked = analysis.frame.dropna(subset="effective_rank")
    parts, lengths = [], []
    for kind, line in lines.items():
        rows = ranked[ranked["kind"] == kind]
        if (rows["tokens"] >= LONG).any():
            rows = rows[rows["tokens"] >= LONG]
        if len(rows):
            parts.append(rows)
            lengths.append(f"{line.name} {rows['tokens'].median():.0f}")
    if not parts:
        raise ResultsError(f"no segment of kind {' or '.join(lines)} to draw")
    frame = pd.concat(parts)
    return frame, f"D = {frame['width'].iloc[0]}; median tokens: {', '.join(lengths)}"


def _rank_panel(
    sheet: _Sheet,
    axes: Axes,
    frame: pd.DataFrame,
    lines: dict[str, _Line],
    mark: int | None = None,
) -> None:
    """Mean rank over layers; ``mark`` is a rank to compare with."""
    labels = []
    for kind, line in lines.items():
        ranks = frame[frame["kind"] == kind].groupby("layer")["effective_rank"]
        if not len(ranks):
            continue
        mean, low, high = ranks.mean(), ranks.quantile(0.25), ranks.quantile(0.75)
        axes.fill_between(mean.index, low, high, color=line.colour, alpha=0.15, linewidth=0)
        _plot(axes, mean.index.to_numpy(), mean.to_numpy(), line)
        labels.append((line, mean.iloc[-1], f"{mean.mean():.1f}"))
    if mark is not None:
        labels.append(_dotted(axes, mark, f"rank {mark}"))
    axes.set(xlabel="layer", ylabel="effective rank")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    sheet.label(axes, labels)


def _retained_panel(sheet: _Sheet, axes: Axes, frame: pd.DataFrame) -> None:
    labels = []
    for kind, line in _PF.items():
        rows = frame[frame["kind"] == kind]
        if rows.empty:
            continue
        errors = [rows[f"error_r{rank}"].mean() for rank in RETAINED]
        _plot(axes, np.array(RETAINED), np.array(errors), line)
        labels.append((line, errors[-1], f"{rows['energy_r8'].mean():.0%}"))
    axes.set_xscale("log", base=2)
    axes.set_xticks(RETAINED, [str(rank) for rank in RETAINED])
    axes.set(xlabel="retained rank", ylabel="relative error", ylim=(0, None))
    labels.append(_dotted(axes, (1 - ENERGY) ** 0.5, f"{ENERGY:.0%} kept"))
    sheet.label(axes, labels)


def _chain_layers(sheet: _Sheet, axes: Axes, frame: pd.DataFrame) -> None:
    labels = []
    for (reference, correction), line in _CHAIN.items():
        rows = frame[(frame["reference"] == reference) & (frame["correction"] == correction)]
        by_layer = [(layer, _interval(part)) for layer, part in rows.groupby("layer")]
        layers = np.array([layer for layer, _ in by_layer])
        value, low, high = np.array([interval for _, interval in by_layer]).T
        if correction != "none":
            axes.fill_between(layers, low, high, color=line.colour, alpha=0.15, linewidth=0)
        _plot(axes, layers, value, line)
        labels.append((line, value[-1], f"{value.mean():.3f}"))
    axes.set(xlabel="layer", ylabel="relative error", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    sheet.label(axes, labels)


def _chain_agents(sheet: _Sheet, axes: Axes, summary: pd.DataFrame, agents: Sequence[str]) -> None:
    labels = []
    for (reference, correction), line in _CHAIN.items():
        rows = summary[
            (summary["reference"] == reference) & (summary["correction"] == correction)
        ].set_index("scope")
        rows = rows.loc[[agent for agent in agents if agent in rows.index]]
        x = [agents.index(agent) for agent in rows.index]
        _plot(axes, np.array(x), rows["error"].to_numpy(), line, every=1)
        if correction != "none":
            axes.vlines(x, rows["error_low"], rows["error_high"], color=line.colour, linewidth=1)
        labels.append((line, rows["error"].iloc[-1], ""))
    axes.set(xlabel="agent, in execution order", ylabel="relative error", ylim=(0, None))
    axes.set_xticks(range(len(agents)), agents)
    sheet.label(axes, labels)


def _dotted(axes: Axes, y: float, text: str) -> tuple[_Line, float, str]:
    """A grey line to compare with, and its label."""
    axes.axhline(y, color=GREY, linestyle=":", linewidth=1)
    return _Line("", GREY, ""), y, text


def _plot(
    axes: Axes,
    x: np.typing.NDArray[np.generic],
    y: np.typing.NDArray[np.float64],
    line: _Line,
    every: int | None = None,
) -> None:
    """A line with about eight markers, or one at every point."""
    every = every or max(1, len(x) // 8)
    axes.plot(
        x,
        y,
        color=line.colour,
        linestyle=line.style,
        marker=line.marker,
        markevery=every,
        # Dotted lines lie on solid ones at times: theirs are hollow.
        markerfacecolor="white" if line.style == ":" else line.colour,
        markeredgecolor=line.colour if line.style == ":" else "white",
        markeredgewidth=1 if line.style == ":" else 0.5,
    )


def _interval(part: pd.DataFrame) -> stats.Estimate:
    clusters = part["request"].astype(str).tolist()
    return stats.cluster_bootstrap(part["error"].tolist(), clusters, seed=0, n_resamples=1_000)


def _same_top(row: Sequence[Axes], least: float) -> None:
    top = max(least, *(axes.get_ylim()[1] for axes in row))
    for axes in row:
        axes.set_ylim(0, top)


def _title(title: str, analysis: Analysis, analyses: Sequence[Analysis]) -> str:
    """Names the model and benchmark where several share the sheet."""
    title = title if title.startswith("(") else title.capitalize()
    if len(analyses) == 1:
        return title
    provenance = analysis.provenance
    return f"{title}: {provenance['model'].partition('@')[0]}, {provenance['bench']}"


def _origin(analysis: Analysis, what: str) -> str:
    """What was measured, on what."""
    p = analysis.provenance
    name, _, revision = p["model"].partition("@")
    return (
        f"{name}@{revision[:10]}, {p['dtype']}, {p['bench']} (data: {p['data']}), n = {p['n']},"
        f" trace {p['trace_sha256'][:10]}; {what}."
    )
