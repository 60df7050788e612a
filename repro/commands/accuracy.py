"""`repro accuracy`: from the command line to cells, with progress, and the table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table as RichTable

import workloads
from kvcmas.errors import UserError
from repro.commands.console import INTERRUPTED, output_console, progress_bar
from repro.commands.settings import check_writable, choose_device, parse_settings
from repro.commands.tables import print_table, write_table
from repro.models import resolve
from repro.profiles import AccuracyProfile, load_profile, override
from repro.runners.accuracy import (
    BASELINE,
    Accuracy,
    Cell,
    Setup,
    apply_settings,
    choose_samples,
    make_cells,
)
from results.records import read_run
from results.tables import build_table


@dataclass(frozen=True)
class Request:
    """The command line of `repro accuracy`; None means the profile decides."""

    bench: str
    methods: str | None
    model: str | None
    n: int | None
    seed: int | None
    profile: str
    data: str | None
    out: Path
    set: Sequence[str]
    dry_run: bool


def run(request: Request) -> None:
    """Run or resume every cell, then print Table 1 and write it beside the runs.

    Raises:
        UserError: anything wrong with the request; nothing has been run then.
    """
    console, notes = output_console(), Console(stderr=True)
    profile, overrides = _profile(request)
    # Everything cheap is checked before a model is fetched.
    options = profile.workload.get(request.bench, {})
    workload = workloads.get(request.bench, **options)
    chosen = apply_settings(profile.methods, profile.settings, overrides)
    dataset = workload.load(profile.data, split=profile.split, seed=0)
    samples = choose_samples(dataset, profile.n, profile.seed)
    if len(samples) < profile.n:
        notes.print(f"[yellow]note:[/] {dataset.label} has {len(samples)} samples, not {profile.n}")
    check_writable(request.out)
    setup = Setup(
        workload=workload,
        dataset=dataset,
        samples=samples,
        model=resolve(profile.model, console=notes),
        dtype=profile.dtype,
        device=choose_device(profile.device),
        seed=profile.seed,
        max_new_tokens=profile.max_new_tokens,
        profile=request.profile,
        out=request.out,
        workload_options=options,
    )
    cells = make_cells(setup, chosen)
    if request.dry_run:
        console.print(_cell_table(cells, len(samples)))
        return
    accuracy = Accuracy(setup)
    _run_cells(accuracy, cells, len(samples), notes)
    made = build_table("1", [read_run(cell.directory) for cell in cells])
    print_table(console, made)
    written = write_table(made, request.out)
    notes.print(f"records and {', '.join(p.name for p in written)} are in {request.out}")


def _profile(request: Request) -> tuple[AccuracyProfile, dict[str, object]]:
    """The profile with the command line on top, and the settings left for methods."""
    profile = load_profile(request.profile).accuracy
    values = parse_settings(request.set)
    top = {key: values.pop(key) for key in list(values) if key in AccuracyProfile.model_fields}
    for key in ("model", "n", "seed", "data"):
        if (value := getattr(request, key)) is not None:
            top[key] = value
    if request.methods is not None:
        top["methods"] = [name.strip() for name in request.methods.split(",") if name.strip()]
    profile = override(profile, top)
    if not profile.methods:
        raise UserError("no method was named")
    return profile, values


def _cell_table(cells: Sequence[Cell], n: int) -> RichTable:
    table = RichTable(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "settings other than defaults", "samples", "run directory"):
        table.add_column(heading, overflow="fold")
    for cell in cells:
        table.add_row(cell.method, cell.label or "-", str(n), str(cell.directory))
    return table


def _run_cells(accuracy: Accuracy, cells: Sequence[Cell], n: int, notes: Console) -> None:
    baseline = next((cell for cell in cells if cell.method == BASELINE), None)
    with progress_bar(notes) as progress:
        tasks = [progress.add_task(cell.method, total=n, start=False) for cell in cells]
        accuracy.warm_up()
        done = 0
        for cell, task in zip(cells, tasks, strict=True):
            progress.start_task(task)
            try:
                for done in accuracy.run(cell, None if cell is baseline else baseline):
                    progress.update(task, completed=done)
            except KeyboardInterrupt:
                progress.stop()
                notes.print(
                    f"interrupted in {cell.method} after {done} of {n} samples; "
                    "give the same command again to go on from there"
                )
                raise typer.Exit(INTERRUPTED) from None
