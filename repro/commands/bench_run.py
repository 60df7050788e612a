"""`repro bench executor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from repro.commands.console import output_console
from repro.commands.settings import choose_device
from repro.env import environment, hardware
from repro.models import load, resolve
from repro.runners.bench import AFTER, BEFORE, bench_executor


def run_executor(
    name: str, shared: int, anchors: int, repeats: int, device: str, out: Path | None
) -> None:
    """Run the bench, print medians and ratios, and write every repeat if asked.

    Raises:
        UserError: a model or context that does not fit, or a file that cannot be written.
    """
    console, notes = output_console(), Console(stderr=True)
    model, _ = load(resolve(name, console=notes), device=choose_device(device))
    with notes.status("starting") as status:
        costs = bench_executor(
            model, shared=shared, anchors=anchors, repeats=repeats, on_step=status.update
        )
    title = f"{name}, layout L0: {BEFORE} + {shared} shared + {AFTER} tokens, {anchors} anchors"
    table = RichTable(title=title, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "median s", "ratio to dense", "lowest", "highest", "goal"):
        table.add_column(heading, justify="left" if not heading else "right")
    for cost in costs:
        table.add_row(
            cost.name,
            f"{cost.median:.3f}",
            f"{cost.ratio:.3f}",
            f"{min(cost.ratios):.3f}",
            f"{max(cost.ratios):.3f}",
            "" if cost.limit is None else f"<= {cost.limit:.2f}",
        )
    console.print(table)
    console.print(
        f"{hardware()}; {repeats} rounds after one discarded; ratios are paired within a round, "
        "the last row's is to Transformers",
        style="dim",
    )
    if out is not None:
        record = {"costs": [asdict(cost) for cost in costs], "environment": environment()}
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(record, indent=2))
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror}") from error
