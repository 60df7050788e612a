"""Figure 5-sensitivity: how the emulated ranking hangs on what a selected token costs.

The public harness makes the whole page of a selected token dirty. Smaller pages are closer to what
selective methods execute; pages of one token are exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from plots.style import GREY, WIDTH, Label, label_ends, look, save, small_print, styled
from results.errors import ResultsError
from results.names import display_name
from results.records import Run
from results.serving import EXACT, ServedCell, of_mode, served_cells, speed_up

_LAW: Final = "even"
_RHO: Final = 0.8
_USUAL_OUTPUT: Final = 128
_TEXT: Final = (
    "EMULATED: no method runs. Lines: p50 TTFT of NonShared over the method's, at the highest rate;"
    " bars: 95% intervals, bootstrap over workflows. Dashed: its work bound, prompt tokens over"
    " executed ones. Selective methods at rho 0.9, the others at rho 0.8."
)


def sensitivity(runs: Sequence[Run], out: Path) -> list[Path]:
    """Speed-ups over the tokens of a page, a panel per context.

    Raises:
        ResultsError: no emulated cells with two sizes of a page.
    """
    cells = [
        cell
        for cell in served_cells(of_mode(runs, "emulated"))
        if cell.serve.arrival == _LAW
        and cell.serve.output_tokens <= _USUAL_OUTPUT
        and cell.key.rho in (_RHO, 0.0, 1.0)
    ]
    contexts = [
        own
        for shared in sorted({cell.serve.shared_tokens for cell in cells})
        if len(pages(own := _at_highest_rate(cells, shared))) > 1
    ]
    if not contexts:
        raise ResultsError(
            "no emulated cells with two sizes of a page; made by: repro serve --mode emulate"
            " --methods nonshared,cacheblend,relaycaching --set emulation.page_tokens=1"
        )
    with styled():
        figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
        panels = figure.subplots(1, len(contexts), squeeze=False, sharey=True)[0]
        labels = [_panel(axes, own) for axes, own in zip(panels, contexts, strict=True)]
        panels[0].set_ylabel("p50 speed-up over NonShared")
        figure.text(0.994, 0.99, "EMULATED", ha="right", va="top", weight="bold")
        info = contexts[0][0].runs[0].info
        origin = f"{info.model}, {info.dtype}, {info.engine}, {info.hardware}"
        small_print(figure, [f"{origin}; arrivals {_LAW}.", _TEXT])
        label_ends(figure, list(zip(panels, labels, strict=True)))
        return save(figure, out, "figure5-sensitivity")


FIGURES: Final = {"5-sensitivity": sensitivity}


def pages(cells: Sequence[ServedCell]) -> list[int]:
    """Sizes of a page that were emulated, in tokens."""
    return sorted({size for cell in cells if (size := _page(cell)) is not None})


def _page(cell: ServedCell) -> int | None:
    size = cell.serve.emulation.get("page_tokens")
    return size if isinstance(size, int) else None


def _at_highest_rate(cells: Sequence[ServedCell], shared: int) -> list[ServedCell]:
    own = [cell for cell in cells if cell.serve.shared_tokens == shared and cell.requests]
    # Where only some rates were repeated with other pages, the highest of those.
    rates = {cell.serve.qps for cell in own if (_page(cell) or 16) != 16}
    return [cell for cell in own if cell.serve.qps == max(rates, default=-1.0)]


def _panel(axes: Axes, cells: Sequence[ServedCell]) -> list[Label]:
    sizes = pages(cells)
    labels = []
    for method, variant in dict.fromkeys(_line(c) for c in cells if c.key.method != EXACT):
        own = [cell for cell in cells if _line(cell) == (method, variant)]
        paged = sorted((c for c in own if _page(c) is not None), key=lambda c: _page(c) or 0)
        drawn = [(size, cell) for cell in paged if (size := _page(cell)) is not None]
        points = drawn or [(size, own[0]) for size in sizes]
        x = [sizes.index(size) for size, _ in points]
        gains = [speed_up(cell, cells, 50) for _, cell in points]
        if any(math.isnan(gain.value) for gain in gains):
            continue
        style, colour = look(method), look(method).colour
        line, marker = ":" if variant else style.line, style.marker if drawn else "None"
        values = [gain.value for gain in gains]
        axes.plot(x, values, color=colour, linestyle=line, marker=marker)
        if drawn:
            axes.vlines(x, [g.low for g in gains], [g.high for g in gains], color=colour, lw=1)
        bounds = [cell.serve.work_bound or math.nan for _, cell in points]
        axes.plot(x, bounds, color=colour, linestyle="--", linewidth=0.8, alpha=0.6)
        name = variant or display_name(method)
        labels.append(Label(values[-1], f"{name} {values[-1]:.2f}", colour))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(-0.3, len(sizes) - 0.7)
    axes.set_xlabel("tokens of a page")
    serve = cells[0].serve
    scale = "" if serve.scale == 1 else f" / {serve.scale:g}"
    title = f"{serve.shared_tokens / 1024:.3g}K{scale} shared, {serve.qps:g} QPS"
    axes.set_title(title, loc="left")
    axes.axhline(1, color=GREY, linewidth=0.6)
    return labels


def _line(cell: ServedCell) -> tuple[str, str]:
    """Method and variant, whatever the size of its pages."""
    words = [word for word in cell.key.label.split() if not word.startswith("page_tokens=")]
    text = " ".join(words).replace("chained=False", "non-chained")
    return cell.key.method, text
