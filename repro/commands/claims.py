"""`repro claims`: the options; the ledger is shown, explained, written and checked elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

REFERENCE = Path("results/reference")


def claims(
    ids: Annotated[
        list[str] | None,
        typer.Argument(help="Claims to explain, e.g. C16: their numbers, records and command."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option("--runs", help="Folder with records [runs; of --check and --write: REF]."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail if a verdict is not the committed one.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Commit to the verdicts of now.")] = False,
    reference: Annotated[
        Path, typer.Option("--reference", metavar="REF", help="Folder of the committed verdicts.")
    ] = REFERENCE,
) -> None:
    """Show the claim ledger: every checkable claim of the paper and its verdict here."""
    from repro.commands import claims_run as command

    folder = runs or (reference if check or write else Path("runs"))
    if write:
        command.write_verdicts(folder, reference)
    elif check:
        command.check_verdicts(folder, reference)
    elif ids:
        command.explain(ids, folder)
    else:
        command.show_claims(folder)
