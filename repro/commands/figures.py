"""`repro figure`: figures of the paper that are drawn from run records."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvcmas.errors import UserError
from results.records import read_runs


def show_figure(number: str, runs: Path, out: Path) -> None:
    """Draw figure ``number`` from all runs below ``runs`` into ``out``.

    Raises:
        UserError: an unknown number.
        ResultsError: no run to draw it from.
    """
    from plots import pareto, serving  # matplotlib is slow to load

    figures = {"4": pareto.figure4, **serving.FIGURES}
    if number not in figures:
        raise UserError(f"unknown figure {number!r}; known here: {', '.join(figures)}")
    found = read_runs(runs) if runs.is_dir() else []
    for path in figures[number](found, out):
        Console(stderr=True).print(f"wrote {path}")
