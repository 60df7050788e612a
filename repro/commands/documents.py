"""`repro pack` and `repro docs`: records for committing, and documents made from them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from kvcmas.errors import UserError
from repro.commands.console import output_console
from results.documents import renew
from results.evidence import read_analyses
from results.records import RUN_FILE, pack


def run_pack(runs: Path, into: Path) -> None:
    """Pack every run and analysis below ``runs``; a run's directory keeps its name.

    Raises:
        UserError: none is there.
    """
    found = sorted(path.parent for path in runs.rglob(RUN_FILE))
    analyses = read_analyses(runs)
    if not found and not analyses:
        raise UserError(f"no run and no analysis is in {runs}")
    for directory in found:
        pack(directory, into / directory.name)
    for analysis in analyses:
        analysis.pack(into)
    total = sum(path.stat().st_size for path in into.rglob("*") if path.is_file())
    many = f"{len(found)} runs and {len(analyses)} analyses"
    typer.echo(f"packed {many} into {into} ({total / 1e6:.1f} MB)")


def run_docs(documents: Sequence[Path], records: Path, *, check: bool) -> None:
    """Renew the generated blocks of Markdown files; with ``check`` only say what would change.

    Raises:
        UserError: a file that cannot be read or written.
    """
    notes = Console(stderr=True)
    stale = []
    for path in _markdown(documents):
        try:
            old = path.read_text(encoding="utf-8")
            new = renew(old, records, str(path))
            if new == old:
                continue
            stale.append(path)
            if check:
                lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
                output_console().print(f"{path}:", *lines, sep="\n", markup=False, highlight=False)
            else:
                path.write_text(new, encoding="utf-8")
                notes.print(f"renewed {path}")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
    if check and stale:
        raise UserError(f"{len(stale)} documents are not what the records say; run: repro docs")
    notes.print("the documents agree with the records" if not stale else f"{len(stale)} renewed")


def _markdown(documents: Sequence[Path]) -> list[Path]:
    found = [p for d in documents for p in (sorted(d.rglob("*.md")) if d.is_dir() else [d])]
    if missing := [path for path in found if not path.exists()]:
        raise UserError(f"{missing[0]} does not exist")
    return found
