"""`repro table` and `repro figure`: the options; from records to the paper's tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.commands.options import Runs


def table(
    number: Annotated[str, typer.Argument(help="Number of the paper's table, or all.")],
    runs: Runs = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Also write CSV, Parquet, Markdown and LaTeX here."),
    ] = None,
) -> None:
    """Make a table of the paper, or all of them, from records only."""
    from repro.commands.tables import show_table, write_tables

    if number == "all":
        write_tables(runs, out or Path("runs/tables"))
    else:
        show_table(number, runs, out)


def figure(
    number: Annotated[str, typer.Argument(help="Number of the paper's figure, or all.")],
    runs: Runs = Path("runs"),
    out: Annotated[Path, typer.Option("--out", help="Where PNG, SVG and PDF go.")] = Path(
        "runs/figures"
    ),
) -> None:
    """Draw a figure of the paper, or all of them, from records only."""
    from repro.commands.figures import draw_figures, show_figure

    if number == "all":
        draw_figures(runs, out)
    else:
        show_figure(number, runs, out)
