"""``repro models``: what the registry holds, and getting a model ready."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from repro.models.entries import ModelEntry
from repro.models.registry import DEFAULT_MODEL, list_models
from repro.models.resolve import is_cached, resolve

app = typer.Typer(help="List the models of the suite and get them ready.", no_args_is_help=True)


@app.command("list")
def list_command() -> None:
    """Show every model, where it comes from and whether it is on this machine."""
    table = Table(title=f"Models (default: {DEFAULT_MODEL})", box=None, padding=(0, 2, 0, 0))
    for header in ("name", "licence", "size", "context", "source", "cached"):
        table.add_column(header, no_wrap=True)
    table.add_column("stands in for", overflow="fold")
    for entry in list_models():
        table.add_row(*_row(entry))
    Console().print(table)


@app.command("get")
def get_command(
    name: Annotated[str, typer.Argument(help="Registry name or model directory.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every stored file; rebuild what is damaged.")
    ] = False,
) -> None:
    """Download, check and convert a model once; print where it is.

    The path alone goes to standard output, everything else to standard error.
    """
    notes = Console(stderr=True)
    resolved = resolve(name, console=notes, verify=verify)
    checked = ", all files verified" if verify and resolved.source != "local" else ""
    notes.print(f"{resolved.name}: {resolved.source}, revision {resolved.revision}{checked}")
    typer.echo(resolved.path)


def _row(entry: ModelEntry) -> tuple[str, ...]:
    return (
        entry.name,
        entry.licence,
        entry.parameters,
        f"{entry.context_length // 1024}K",
        entry.origin.kind,
        "yes" if is_cached(entry) else "no",
        entry.stands_in_for or "-",
    )
