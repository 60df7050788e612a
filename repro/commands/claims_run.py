"""What `repro claims` prints, writes and checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from repro.commands.console import output_console
from results.claims import CLAIM_IDS, LedgerRow, PaperValue
from results.evidence import Evidence, read_evidence
from results.ledger import VERDICTS_FILE, as_text, changes
from results.verdicts import judged

CHANGED = 1
"""Exit code when a verdict is not the committed one."""


def show_claims(folder: Path) -> None:
    """Print the ledger with the verdicts and numbers that the records below ``folder`` give."""
    console = output_console()
    rows = _rows(read_evidence(folder))
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("id", "section", "kind", "here", "claim", "verdict"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "id")
    for row in rows:
        claim = row.claim
        table.add_row(
            claim.id,
            ", ".join(claim.section),
            claim.kind,
            ", ".join(claim.here),
            "\n".join((escape(claim.statement), *map(escape, row.texts))),
            row.verdict,
        )
    console.print(table)
    console.print(_summary(rows), highlight=False)


def explain(ids: Sequence[str], folder: Path) -> None:
    """Print everything about some claims: the paper's values, ours, the records, the command.

    Raises:
        UserError: no such claim.
    """
    console, evidence = output_console(), read_evidence(folder)
    rows = {row.claim.id: row for row in _rows(evidence)}
    if unknown := [id_ for id_ in ids if id_ not in rows]:
        raise UserError(f"no claim {unknown[0]}; there are {CLAIM_IDS[0]} to {CLAIM_IDS[-1]}")
    for id_ in ids:
        claim = rows[id_].claim
        lines = [
            f"{claim.id} ({', '.join(claim.section)}): {claim.statement}",
            f"paper: {claim.setting}",
            *(f"paper: {_stated(value)}" for value in claim.paper_values),
            f"measured: {claim.measure}",
            f"verdict: {rows[id_].verdict}",
            *(f"here: {text}" for text in rows[id_].texts),
            *(f"record: {key} {evidence.where(key) or ''}" for key in rows[id_].runs),
            f"command: {claim.command or claim.no_command}",
            "",
        ]
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def write_verdicts(folder: Path, reference: Path) -> None:
    """Write the verdicts of the records below ``folder`` as the committed ones.

    Raises:
        UserError: the file cannot be written.
    """
    rows, path = _rows(read_evidence(folder)), reference / VERDICTS_FILE
    changed = changes(rows, path) if path.exists() else []
    try:
        reference.mkdir(parents=True, exist_ok=True)
        path.write_text(as_text(rows), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    typer.echo("\n".join((*changed, f"wrote {path}: {_summary(rows)}")))


def check_verdicts(folder: Path, reference: Path) -> None:
    """Exit with ``CHANGED`` if the records below ``folder`` give another verdict somewhere."""
    rows, path = _rows(read_evidence(folder)), reference / VERDICTS_FILE
    if changed := changes(rows, path):
        typer.echo("\n".join(changed))
        Console(stderr=True).print(
            f"{len(changed)} verdicts differ from {path}; if that is right: repro claims --write"
        )
        raise typer.Exit(CHANGED)
    typer.echo(f"all verdicts are as in {path}: {_summary(rows)}")


def _rows(evidence: Evidence) -> list[LedgerRow]:
    return judged(evidence.runs, evidence.analyses)


def _summary(rows: Sequence[LedgerRow]) -> str:
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts))


def _stated(value: PaperValue) -> str:
    number = f"{value.low} to {value.high}" if value.value is None else f"{value.value}"
    return f"{value.quantity} {value.relation.replace('_', ' ')} {number} {value.unit}"
