"""`repro bench connector`."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from repro.commands.console import output_console
from repro.env import environment, hardware
from repro.models import resolve
from repro.runners.bench_connector import ENGINES, LIMIT, Overhead, bench_connector

_LABELS = {
    "stock": "stock vLLM",
    "control": "stock vLLM again (A/A control)",
    "connector": "NonShared through the connector",
}


def run_connector(name: str, shared: int, requests: int, out: Path | None) -> None:
    """Run the bench, print the ratios, and write every pair if asked.

    Raises:
        UserError: vLLM is missing, a model that does not fit, or a file that cannot be written.
    """
    notes = Console(stderr=True)
    model = resolve(name, console=notes)
    with notes.status("starting") as status:
        overhead = bench_connector(
            model.path, _vocab(model.path), shared=shared, requests=requests, on_step=status.update
        )
    output_console().print(_table(overhead, name, shared))
    output_console().print(
        f"{hardware()}; medians of {overhead.requests} requests served by all three in turn, one "
        "process each; ratios are paired by request, with 95% bootstrap intervals",
        style="dim",
    )
    if out is not None:
        record = {**asdict(overhead), "model": name, "environment": environment()}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=2))
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}") from error


def _vocab(directory: Path) -> int:
    try:
        return int(json.loads((directory / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory} has no config.json with a vocab_size") from error


def _table(overhead: Overhead, name: str, shared: int) -> RichTable:
    title = f"{name}, layout T with {shared} shared tokens, vLLM"
    table = RichTable(title=title, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "TTFT s", "ratio", "goal"):
        table.add_column(heading, justify="left" if not heading else "right")
    for engine in ENGINES:
        ratio = overhead.ratio(engine)
        table.add_row(
            _LABELS[engine],
            f"{statistics.median(overhead.ttft[engine]):.3f}",
            "" if engine == "stock" else f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
            f"<= {LIMIT:.2f}" if engine == "connector" else "",
        )
    return table
