"""`repro figure`: figures of the paper that are drawn from records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvcmas.errors import UserError
from results.evidence import digest, read_evidence

if TYPE_CHECKING:
    from plots.registry import Drawn

# What a folder of figures was drawn from.
INDEX_FILE = "figures.json"


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


def draw_figures(runs: Path, out: Path) -> list[Drawn]:
    """Draw every figure of the paper, and variants that have records, and say what is empty.

    ``figures.json`` beside them holds the hash of the records they were drawn from.
    """
    from plots.registry import draw_all

    evidence, notes = read_evidence(runs), Console(stderr=True)
    drawn, index = [], {}
    for one in draw_all(evidence, out):
        drawn.append(one)
        index[one.spec.number] = {
            "title": one.spec.title,
            "command": one.spec.command,
            "files": [path.relative_to(out).as_posix() for path in one.paths],
            "empty": one.empty,
        }
        notes.print(f"figure {one.spec.number}: {one.empty or 'drawn'}", style="dim")
    text = json.dumps({"records": digest(runs), "figures": index}, indent=1)
    (out / INDEX_FILE).write_text(f"{text}\n", encoding="utf-8")
    notes.print(f"figures are in {out}")
    return drawn
