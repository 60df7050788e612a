"""`repro accuracy`: from the command line to cells, with progress, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
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
from repro.runners.deadline import Deadline, TimeIsUp
from repro.runners.reserved import Reserved
from repro.runners.shares import Tell, failure, run_shares, split
from repro.runners.vision import check_pictures
from results.records import RUN_FILE, read_run
from results.tables import build_table
from traces.schema import TraceWorkflow
from workloads.vision_samples import some

SAMPLES_RUN = "samples of all cells are run"


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
    time_limit: float | None = None
    profile: str = "smoke"
    data: str | None = None
    cells: Sequence[str] = ()
    study: str | None = None
    out: Path = Path("runs")
    set: Sequence[str] = ()
    dry_run: bool = False


def run(request: Request) -> None:
    """Run or resume every cell, then print Table 1 and write it beside the runs.

    At a time limit the table is that of the samples that are there.

    Raises:
        UserError: anything wrong with the request; nothing has been run then.
    """
    console, notes = output_console(), Console(stderr=True)
    profile, specs = _profile(request)
    setup = _setup(request, profile, notes)
    seeds = range(profile.seed, profile.seed + profile.orders)
    if request.dry_run:
        console.print(plan_table(setup, specs, seeds, profile.time_limit))
        return
    deadline = Deadline(profile.time_limit)
    accuracy = Accuracy(setup)

    def followed(rows: Iterable[TraceWorkflow]) -> Iterable[TraceWorkflow]:
        total = setup.warm + setup.calibration
        return follow(rows, f"recording {total} reserved requests", total, notes)

    def told(step: str) -> None:
        notes.print(step, style="dim", markup=False)

    reserved = Reserved(accuracy, followed, told, deadline)
    cells: list[Cell] = []
    try:
        _search(request, profile, reserved, specs, told)
        cells = make_cells(setup, specs, seeds, reserved.calibrate)
        _run_cells(accuracy, cells, reserved, deadline, notes)
    except TimeIsUp as stop:
        notes.print(f"{stop}; give the same command again to go on from there")
    there = [cell.directory for cell in cells if (cell.directory / RUN_FILE).exists()]
    if not there:
        return
    made = build_table("1", [read_run(directory) for directory in there])
    print_table(console, made)
    written = write_table(made, request.out)
    notes.print(f"records and {', '.join(p.name for p in written)} are in {request.out}")


def _profile(request: Request) -> tuple[AccuracyProfile, list[CellSpec]]:
    """The profile with the command line on top, and the cells to run."""
    profile = load_profile(request.profile).accuracy.at(request.bench)
    values = parse_settings(request.set)
    top = {key: values.pop(key) for key in list(values) if key in AccuracyProfile.model_fields}
    for key in ("model", "n", "seed", "orders", "warm", "calibration", "time_limit", "data"):
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


def _search(
    request: Request,
    profile: AccuracyProfile,
    reserved: Reserved,
    specs: Sequence[CellSpec],
    told: Callable[[str], None],
) -> None:
    """Find several thresholds at once, in processes of their own, for the calibration to find.

    What one of them has not found is searched, and its error met, by this process.
    """
    parts = split(reserved.unknown(specs), profile.jobs, choose_device(profile.device))
    shares = [(request, part, threads) for part, threads in parts]
    if failed := run_shares(_share, shares, lambda share, step: told(step)):
        told(failure(failed, len(shares)))


def _share(request: Request, specs: Sequence[CellSpec], threads: int, tell: Tell) -> None:
    """Search some of the cells' thresholds; what is found lies in files."""
    torch.set_num_threads(threads)
    profile, _ = _profile(request)
    setup = _setup(request, profile, Console(quiet=True))
    reserved = Reserved(Accuracy(setup), iter, tell, Deadline(None))
    for spec in specs:
        reserved.find(spec)


def _run_cells(
    accuracy: Accuracy,
    cells: Sequence[Cell],
    reserved: Reserved,
    deadline: Deadline,
    notes: Console,
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
                    for fresh, count in enumerate(accuracy.run(cell, before, warm, until=stop)):
                        done[cell.key] = count
                        progress.update(task, completed=sum(done.values()))
                        # Its first count is that of the samples which were there.
                        if fresh:
                            deadline.check(sum(done.values()), total * len(cells), SAMPLES_RUN)
        except KeyboardInterrupt:
            progress.stop()
            notes.print(
                f"interrupted: {sum(done.values())} of {total * len(cells)} {SAMPLES_RUN}; "
                "give the same command again to go on from there"
            )
            raise typer.Exit(INTERRUPTED) from None
