"""`repro all`: the options; the work is in :mod:`repro.commands.everything_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.commands.options import ProfileName


def everything(
    profile: ProfileName = "smoke",
    out: Annotated[
        Path | None, typer.Option("--out", help="Where everything goes [runs/PROFILE].")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder with a folder of files per benchmark: gsm8k, mmlu."),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", help="Comma-separated names of cells.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells with their state and time; stop.")
    ] = False,
) -> None:
    """Run a whole profile, then make every table and figure, the verdicts and the report.

    Finished cells are kept; a cell that failed or was interrupted goes on where it stopped.
    """
    from repro.commands.everything_run import run

    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    run(profile, out or Path("runs") / profile, names, dry_run=dry_run, data=data)
