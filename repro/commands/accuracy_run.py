"""`repro accuracy`: from the command line to cells, with progress, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

import workloads
from kvcmas.errors import UserError
from repro.commands.accuracy_plan import plan_table
from repro.commands.console import INTERRUPTED, follow, output_console, progress_bar
from repro.commands.fidelity import parse_cell
from repro.commands.settings import check_writable, choose_device, parse_settings
from repro.commands.tables import print_table, write_table
from repro.data import load_dataset
from repro.models import resolve
from repro.profiles import AccuracyProfile, CellSpec, load_profile, load_study, override
from repro.runners.accuracy import BASELINE, Accuracy, Setup, block_ends, make_cells
from repro.runners.cells import Cell, apply_settings, choose_cells, with_defaults, with_rho
from repro.runners.reserved import Reserved
from repro.runners.vision import check_pictures
from results.records import read_run
from results.tables import build_table
from traces.schema import TraceWorkflow
from workloads.vision_samples import some


@dataclass(frozen=True)
class Request:
    """The command line of `repro accuracy`; None means the profile decides."""

    bench: str
    methods: str | None = None
    model: str | None = None
    n: int | None = None
    seed: int | None = None
    orders: int | None = None
    warm: int | None = None
    calibration: int | None = None
    rho: float | None = None
    profile: str = "smoke"
    data: str | None = None
    cells: Sequence[str] = ()
    study: str | None = None
    out: Path = Path("runs")
    set: Sequence[str] = ()
    dry_run: bool = False


def run(request: Request) -> None:
    """Run or resume every cell, then print Table 1 and write it beside the runs.

    Raises:
        UserError: anything wrong with the request; nothing has been run then.
    """
    console, notes = output_console(), Console(stderr=True)
    profile, specs = _profile(request)
    setup = _setup(request, profile, notes)
    seeds = range(profile.seed, profile.seed + profile.orders)
    if request.dry_run:
        console.print(plan_table(setup, specs, seeds))
        return
    accuracy = Accuracy(setup)

    def followed(rows: Iterable[TraceWorkflow]) -> Iterable[TraceWorkflow]:
        total = setup.warm + setup.calibration
        return follow(rows, f"recording {total} reserved requests", total, notes)

    reserved = Reserved(accuracy, followed, lambda step: notes.print(step, style="dim"))
    cells = make_cells(setup, specs, seeds, reserved.calibrate)
    _run_cells(accuracy, cells, reserved, notes)
    made = build_table("1", [read_run(cell.directory) for cell in cells])
    print_table(console, made)
    written = write_table(made, request.out)
    notes.print(f"records and {', '.join(p.name for p in written)} are in {request.out}")


def _profile(request: Request) -> tuple[AccuracyProfile, list[CellSpec]]:
    """The profile with the command line on top, and the cells to run."""
    profile = load_profile(request.profile).accuracy.at(request.bench)
    values = parse_settings(request.set)
    top = {key: values.pop(key) for key in list(values) if key in AccuracyProfile.model_fields}
    for key in ("model", "n", "seed", "orders", "warm", "calibration", "data"):
        if (value := getattr(request, key)) is not None:
            top[key] = value
    profile = override(profile, top)
    cells: Sequence[CellSpec] = profile.cells
    if request.study is not None:
        cells = load_study(request.study)
    if request.cells:
        cells = [parse_cell(text) for text in request.cells]
    names = None
    if request.methods is not None:
        names = [name.strip() for name in request.methods.split(",") if name.strip()]
    chosen = with_defaults(choose_cells(cells, names), profile.settings)
    if request.rho is not None:
        chosen = with_rho(chosen, request.rho)
    if not chosen:
        raise UserError("no method was named")
    return profile, apply_settings(chosen, values)


def _setup(request: Request, profile: AccuracyProfile, notes: Console) -> Setup:
    """Everything the cells share. What is cheap is checked before a model is fetched."""
    options = profile.workload.get(request.bench, {})
    workload = workloads.get(request.bench, **options)
    dataset = load_dataset(workload, profile.data, split=profile.split, console=notes)
    held_out = None
    if profile.held_out == "calibration" and profile.warm + profile.calibration:
        held_out = load_dataset(workload, profile.data, split="calibration", console=notes)
    if dataset.missing:
        left = f"{len(dataset.missing)} samples of {dataset.label} are left out, their pictures"
        notes.print(f"[yellow]note:[/] {left} are not there: {some(dataset.missing)}")
    check_pictures(dataset.samples[: profile.n])
    if (there := len(dataset.samples)) < profile.n:
        notes.print(f"[yellow]note:[/] {dataset.label} has {there} samples, not {profile.n}")
    check_writable(request.out)
    setup = Setup(
        workload=workload,
        dataset=dataset,
        n=profile.n,
        model=resolve(profile.model, console=notes),
        dtype=profile.dtype,
        device=choose_device(profile.device),
        max_new_tokens=profile.max_new_tokens,
        final_tokens=profile.final_tokens,
        profile=request.profile,
        out=request.out,
        warm=profile.warm,
        calibration=profile.calibration,
        held_out=held_out,
        workload_options=options,
    )
    setup.reserved  # noqa: B018 - too few samples are told of now
    return setup


def _run_cells(
    accuracy: Accuracy, cells: Sequence[Cell], reserved: Reserved, notes: Console
) -> None:
    baseline = next((cell for cell in cells if cell.method == BASELINE), None)
    warm = reserved.warm
    total = min(accuracy.setup.n, len(accuracy.setup.dataset.samples))
    # In another order a method would come to samples before what they are compared with is there.
    same_order = len({cell.seed for cell in cells}) == 1
    stops = block_ends(total) if same_order else [total]
    done = dict.fromkeys((cell.key for cell in cells), 0)
    with progress_bar(notes) as progress:
        task = progress.add_task("samples", total=total * len(cells))
        accuracy.warm_up()
        try:
            for stop in stops:
                for cell in cells:
                    if done[cell.key] >= stop:
                        continue
                    progress.update(task, description=f"{cell.method} {cell.label}".strip())
                    before = None if cell is baseline else baseline
                    for count in accuracy.run(cell, before, warm, until=stop):
                        done[cell.key] = count
                        progress.update(task, completed=sum(done.values()))
        except KeyboardInterrupt:
            progress.stop()
            notes.print(
                f"interrupted after {sum(done.values())} of {total * len(cells)} samples of all "
                "cells; give the same command again to go on from there"
            )
            raise typer.Exit(INTERRUPTED) from None
