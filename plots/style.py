"""One look for all figures: a colour, marker and line per method, print sizes, direct labels.

The colours are told apart with the common colour vision deficiencies (Okabe and Ito's set, with
indigo and wine of Tol's); markers differ as well, so that no figure depends on colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from results.errors import ResultsError

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

WIDTH: Final = 7.0  # inches; the text width of a two-column page
FORMATS: Final = ("png", "svg", "pdf")
GREY: Final = "#6b6b6b"
_LINE: Final = 120  # characters of small print that fit the width, hexadecimal digits too

_RC: Final[Mapping[RcKeyType, Any]] = MappingProxyType(
    {
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.labelsize": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.5,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "savefig.dpi": 200,
        # Text stays text, and equal data give equal files.
        "svg.fonttype": "none",
        "svg.hashsalt": "kvcmas-repro",
        "pdf.fonttype": 42,
    }
)
_METADATA: Final[Mapping[str, dict[str, None]]] = MappingProxyType(
    {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
)


@dataclass(frozen=True)
class Look:
    """How a method is drawn everywhere."""

    colour: str
    marker: str
    line: str = "-"

    def plot(self) -> dict[str, Any]:
        """Keyword arguments of ``Axes.plot``."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


METHODS: Final[Mapping[str, Look]] = MappingProxyType(
    {
        "nonshared": Look("#000000", "o"),
        "fullshared": Look("#7f7f7f", "s", "--"),
        "droidspeak": Look("#0072b2", "D"),
        "cacheblend": Look("#56b4e9", "^"),
        "relaycaching": Look("#009e73", "v"),
        "epic": Look("#332288", ">"),
        "graphflow": Look("#e69f00", "P"),
        "kvcomm": Look("#cc79a7", "X"),
        "kvcmas": Look("#d55e00", "*"),
        "oracle": Look("#882255", "h", ":"),
    }
)
OTHER: Final = Look(GREY, ".")


def look(method: str) -> Look:
    """The look of a method; one of somebody else is grey."""
    return METHODS.get(method, OTHER)


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib settings of this project, inside the block only."""
    with matplotlib.rc_context(dict(_RC)):
        yield


class Label(NamedTuple):
    """Text at the right end of a line, at height ``y`` in data units."""

    y: float
    text: str
    colour: str


def label_ends(figure: Figure, panels: Sequence[tuple[Axes, Sequence[Label]]]) -> None:
    """Write labels right of each panel, in order of height and never over one another.

    Call it last: the limits of the panels must be final.
    """
    figure.draw_without_rendering()
    size = 7.5
    for axes, labels in panels:
        gap = 1.2 * size / 72 * figure.dpi / axes.get_window_extent().height
        transform = axes.transData + axes.transAxes.inverted()
        ordered = sorted(labels, key=lambda label: label.y)
        right = axes.get_xlim()[1]
        heights = [float(transform.transform((right, label.y))[1]) for label in ordered]
        for label, height in zip(ordered, spread(heights, gap, top=1), strict=True):
            axes.annotate(
                label.text,
                (1.015, height),
                xycoords="axes fraction",
                color=label.colour,
                fontsize=size,
                va="center",
                annotation_clip=False,
            )


def spread(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Ascending heights moved apart to at least ``gap``, within 0 and ``top`` if there is room.

    Heights that are too close form a group, which stays centred where it was.
    """
    groups: list[list[float]] = []

    def place(group: Sequence[float]) -> tuple[float, float]:
        """Lowest and highest place of a group."""
        extent = gap * (len(group) - 1)
        low = sum(group) / len(group) - extent / 2
        low = max(0.0, min(low, top - extent))
        return low, low + extent

    for height in heights:
        groups.append([height])
        while len(groups) > 1 and place(groups[-1])[0] < place(groups[-2])[1] + gap:
            last = groups.pop()
            groups[-1] += last
    return [place(group)[0] + gap * i for group in groups for i in range(len(group))]


def small_print(figure: Figure, notes: Sequence[str]) -> None:
    """Grey lines below the panels, which make room for them; long ones are wrapped."""
    text = "\n".join(line for note in notes for line in wrap(note, _LINE))
    height = 0.03 + 0.125 * (text.count("\n") + 1) / figure.get_figheight()
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(rect=(0, height, 1, 1 - height), wspace=0.05)
    figure.text(0.006, 0.01, text, fontsize=6.2, color=GREY, va="bottom")


def save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Write ``name`` as PNG, SVG and PDF; returns the paths.

    Raises:
        ResultsError: they cannot be written.
    """
    paths = [directory / f"{name}.{suffix}" for suffix in FORMATS]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, suffix in zip(paths, FORMATS, strict=True):
            figure.savefig(path, metadata=_METADATA[suffix])
    except OSError as error:
        raise ResultsError(f"cannot write figures to {directory}: {error.strerror}") from error
    return paths
