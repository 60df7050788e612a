"""`repro model`: TTFT of every method by a queue model; nothing is run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from repro.commands.console import output_console
from repro.commands.tables import print_table, write_table
from repro.commands.traces import tokens_of
from repro.profiles import load_profile, override
from repro.runners.hop_costs import Hardware, HopCosts, load_hardware
from repro.runners.modelled import store
from repro.runners.queue_study import VOCAB, Modelled, Skipped, predict, validate
from repro.runners.serving.capacity import LLAMA_8B
from results.comparable import split_settings
from results.records import Run, read_runs
from results.serving import of_mode
from results.tables import build_table
from traces import GeneratorSettings


@dataclass(frozen=True)
class Request:
    """What was asked for; None means the `paper` profile decides."""

    gpu: str
    ctx: str
    outputs: int
    qps: str
    rho: str
    arrival: Literal["even", "workflow", "poisson"]
    methods: str | None
    requests: int | None
    repeats: int | None
    schedule: Literal["controlled", "even"]
    step_rows: int | None
    records: bool
    out: Path


def run(request: Request) -> None:
    """Model all cells, print them and write them as CSV.

    Raises:
        UserError: anything wrong with the request.
    """
    hardware = load_hardware()
    gpus = [hardware.gpu(name) for name in _parts(request.gpu)]
    values: dict[str, Any] = {
        "arrival": {request.arrival: [_number(part, "qps") for part in _parts(request.qps)]},
        "rho": [_number(part, "rho") for part in _parts(request.rho)],
    }
    values |= {
        key: value
        for key in ("requests", "repeats")
        if (value := getattr(request, key)) is not None
    }
    profile = load_profile("paper").serve
    if request.methods is not None:
        wanted = ["nonshared", *_parts(request.methods)]
        known = {spec.method for spec in profile.methods}
        others = [{"method": name} for name in dict.fromkeys(wanted) if name not in known]
        values["methods"] = [s for s in profile.methods if s.method in wanted] + others
    profile = override(profile, values)
    if profile.requests % profile.agents:
        raise UserError(f"requests={profile.requests} is no multiple of {profile.agents} agents")
    costs = HopCosts(LLAMA_8B)
    rows: list[Modelled] = []
    for ctx in _parts(request.ctx):
        settings = GeneratorSettings(
            vocab=VOCAB,
            shared=tokens_of(ctx),
            output=request.outputs,
            workflows=profile.requests // profile.agents,
            agents=profile.agents,
        )
        for gpu in gpus:
            rows += predict(
                profile,
                settings,
                costs,
                gpu,
                hardware.utilisation,
                schedule=request.schedule,
                step_rows=request.step_rows,
                records=request.out / "model" if request.records else None,
            )
    notes = _notes(hardware, request)
    console = output_console()
    console.print(_table(rows))
    for note in notes:
        console.print(note, style="dim", highlight=False)
    _write(request.out / "model.csv", notes, [asdict(row) for row in rows])


def check(runs: Path, out: Path, *, records: bool = False) -> None:
    """Compare the model with served cells; print and write the error of each.

    Args:
        records: also write the predicted runs, below ``out``.

    Raises:
        UserError: no served cell under load that could be compared.
    """
    real = of_mode(read_runs(runs))
    found = [one for _, group in split_settings(real) for one in validate(group)]
    modelled = [one for one in found if isinstance(one, Run)]
    skipped = [one for one in found if isinstance(one, Skipped)]
    notes = Console(stderr=True)
    for one in skipped:
        notes.print(f"not compared: {one.name}: {one.reason}", style="yellow", highlight=False)
    if not modelled:
        raise UserError(f"no cell in {runs} has both a load and a single stream (qps 0)")
    table = build_table("model-check", [*real, *modelled])
    print_table(output_console(), table)
    for path in write_table(table, out):
        notes.print(f"written to {path}")
    if records:
        for run in modelled:
            store(out / "model", run)
        notes.print(f"predicted runs are in {out / 'model'}")


def _table(rows: Sequence[Modelled]) -> RichTable:
    title = "modelled TTFT: a queue model, nothing was measured"
    table = _headed("GPU", "trace", "rho", "arrival", "QPS", "method", "variant", title=title)
    for heading in ("p50 s", "x", "p90 s", "x", "bound"):
        table.add_column(heading, justify="right")
    for row in rows:
        load = (row.gpu.split()[0], row.trace, f"{row.rho:g}", row.arrival, f"{row.qps:g}")
        shown = (_seconds(row.p50_s), _ratio(row.speedup_p50))
        if row.out_of_memory:
            shown = ("OOM", f"{row.needed_gb:.0f} GB")
        table.add_row(
            *(*load, row.method, row.variant, *shown, _seconds(row.p90_s)),
            *(_ratio(row.speedup_p90), _ratio(row.work_bound)),
        )
    return table


def _notes(hardware: Hardware, request: Request) -> list[str]:
    used = hardware.utilisation
    step = "whole requests" if request.step_rows is None else f"steps of {request.step_rows} rows"
    return [
        "modelled: Llama-3.1-8B, bf16, one GPU, one server, first come first served,"
        f" {step}; {used.compute:.0%} of peak FLOPs, {used.bandwidth:.0%} of peak bandwidth"
        " (assumed); anchor building left out; full pools",
        "x: NonShared's percentile over the method's under the same load; bound: dense prompt"
        " tokens over executed ones, which holds for work, not between two capacities",
    ]


def _headed(*headings: str, title: str | None = None) -> RichTable:
    table = RichTable(title=title, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading in ("GPU", "trace", "method"))
    return table


def _write(path: Path, notes: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """CSV below its notes, which are lines that start with ``#``; NaN is an empty field."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            file.writelines(f"# {note}\n" for note in notes)
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: "" if v != v else v for k, v in row.items()} for row in rows)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    Console(stderr=True).print(f"written to {path}")


def _parts(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UserError("an option with a list needs at least one value")
    return parts


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--{option}: {text!r} is no number") from None


def _seconds(value: float) -> str:
    return "" if value != value else f"{value:.3f}"


def _ratio(value: float) -> str:
    return "" if value != value else f"{value:.2f}"
