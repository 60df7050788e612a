"""`repro stream`: cells with an estimate and progress, and the tables at the end."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch
import typer
from rich.console import Console

from repro import env
from repro.commands.console import INTERRUPTED, output_console, progress_bar
from repro.commands.settings import check_writable, choose_device
from repro.commands.stream_plan import Request, cells_of, stream_profile, sweeps
from repro.commands.stream_view import Estimate, dry_run_table, finished_line, header
from repro.commands.tables import print_table, write_table
from repro.models.loading import check_device
from repro.profiles.stream import StreamShape
from repro.runners.serving.memory import parse_bytes
from repro.runners.stream.cells import Cell
from repro.runners.stream.model import StreamModel, stream_model
from repro.runners.stream.run import Runner
from results.records import Run, read_run
from results.tables import build_table

__all__ = ["Request", "run"]

TABLES = ("11", "12", "13", "14", "15")


def run(request: Request) -> None:
    """Run every cell that is not finished yet, then print and write the tables.

    Raises:
        UserError: anything wrong with the request; nothing has been run then.
    """
    console, notes = output_console(), Console(stderr=True)
    profile, settings = stream_profile(request)
    todo = sweeps(request, profile, settings)
    device = choose_device(profile.device)
    if not request.dry_run:
        check_device(device)
    check_writable(request.out)
    limit = parse_bytes(profile.memory_limit) if profile.memory_limit else _memory_of(device)
    known: dict[tuple[str, str], StreamModel] = {}

    def model(shape: StreamShape) -> StreamModel:
        key = (shape.model, shape.load)
        if key not in known:
            known[key] = stream_model(shape, profile.dtype, device, notes)
        return known[key]

    identity = {
        "device": device,
        "hardware": env.hardware(),
        "threads": torch.get_num_threads(),
        "packages": env.environment()["packages"],
    }
    cells = cells_of(todo, profile, model, identity, request.out)
    runner = Runner(device, limit, request.profile)
    estimate = Estimate(device)
    if request.dry_run:
        console.print(dry_run_table(cells, estimate, limit))
        return
    for line in header(cells):
        console.print(line, highlight=False, style="dim")
    runs = _run(cells, runner, estimate, request, notes)
    tables = request.out / "tables"
    for number in TABLES:
        table = build_table(number, runs)
        if len(table.frame):
            print_table(console, table)
            write_table(table, tables)
    notes.print(f"records are in {request.out / 'stream'}, tables in {tables}")


def _run(
    cells: Sequence[Cell], runner: Runner, estimate: Estimate, request: Request, notes: Console
) -> list[Run]:
    """Run what is missing, with progress; Ctrl-C leaves what is done."""
    done = {cell.key: runner.finished(cell) if request.resume else None for cell in cells}
    missing = [cell for cell in cells if done[cell.key] is None]
    minutes = sum(estimate.seconds(cell) for cell in missing if runner.fits(cell)) / 60
    notes.print(f"{len(cells)} cells, {len(missing)} to run; about {minutes:.0f} min")
    runs = []
    with progress_bar(notes) as progress:
        total = sum(len(cell.stage.workload.workflows) for cell in missing)
        task = progress.add_task("workflows", total=total)
        runner.on_step = lambda step: progress.update(task, description=step)
        try:
            for cell in cells:
                run = done[cell.key]
                if run is None:
                    same = [other for other in missing if other.stage is cell.stage]
                    runner.teach(same)
                    progress.update(task, description=f"{cell.name} on {cell.stage.name}")
                    for _ in runner.run(cell, anew=not request.resume):
                        progress.advance(task)
                    run = read_run(cell.directory)
                    notes.print(finished_line(cell, run), highlight=False)
                runs.append(run)
        except KeyboardInterrupt:
            progress.stop()
            notes.print(
                f"interrupted after {len(runs)} of {len(cells)} cells; give the same command again"
                " to go on from there"
            )
            raise typer.Exit(INTERRUPTED) from None
    return runs


def _memory_of(device: str) -> int:
    """All memory of the device, in bytes; of this machine where the device is not here."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total
