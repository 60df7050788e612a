"""`repro report`: the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.commands.options import Runs


def report(
    runs: Runs = Path("runs"),
    out: Annotated[Path, typer.Option("--out", help="The HTML file.")] = Path("runs/report.html"),
) -> None:
    """Write one HTML page with claims, tables, figures and where they come from."""
    from repro.commands.report_run import write_report

    typer.echo(f"wrote {write_report(runs, out)}")
