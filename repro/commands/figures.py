"""`repro figure`: figures of the paper that are drawn from records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from kvcmas.errors import UserError
from results.errors import ResultsError
from results.evidence import digest, read_evidence

# What a folder of figures was drawn from.
INDEX_FILE = "figures.json"


@dataclass(frozen=True)
class Drawn:
    """One figure in a folder: its files, relative to it, and why it is empty, if it is."""

    title: str
    files: tuple[str, ...]
    empty: str | None
    command: str


def show_figure(number: str, runs: Path, out: Path) -> None:
    """Draw figure ``number`` from all records below ``runs`` into ``out``.

    Raises:
        UserError: an unknown number.
        ResultsError: no record to draw it from.
    """
    from plots.registry import draw_figure, known_figures  # matplotlib is slow to load

    if number not in known_figures():
        raise UserError(f"unknown figure {number!r}; known here: {', '.join(known_figures())}")
    for path in draw_figure(number, read_evidence(runs), out):
        Console(stderr=True).print(f"wrote {path}")


def draw_figures(runs: Path, out: Path) -> dict[str, Drawn]:
    """Draw every figure of the paper, and variants that have records, and say what is empty.

    ``figures.json`` beside them holds the hash of the records they were drawn from.
    """
    from plots.registry import FIGURES, draw_figure, draw_or_say, known_figures

    evidence, notes = read_evidence(runs), Console(stderr=True)
    drawn = {}
    for number in known_figures():
        if number in FIGURES:
            spec = FIGURES[number]
            paths, empty = draw_or_say(number, evidence, out)
        else:
            base, _, variant = number.partition("-")
            spec = FIGURES[base]
            try:
                paths, empty = draw_figure(number, evidence, out), None
            except ResultsError:
                continue  # a variant without records
        names = tuple(path.relative_to(out).as_posix() for path in paths)
        title = spec.title if number in FIGURES else f"{spec.title}, {variant}"
        drawn[number] = Drawn(title, names, empty, spec.command)
        notes.print(f"figure {number}: {empty or 'drawn'}", style="dim", highlight=False)
    index = {"records": digest(runs), "figures": {n: asdict(d) for n, d in drawn.items()}}
    (out / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    notes.print(f"figures are in {out}")
    return drawn
