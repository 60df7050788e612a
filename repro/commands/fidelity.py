"""`repro fidelity`: the cells of one replay, their records and tables."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

import typer
from rich.console import Console

from kvcmas.engine.segments import ids_sha256
from kvcmas.registry import make_method
from repro import env
from repro.commands.console import INTERRUPTED, output_console, progress_bar
from repro.commands.options import Request
from repro.commands.recorded import Setting, label
from repro.commands.settings import parse_settings
from repro.commands.tables import print_table, write_table
from repro.profiles import CellSpec, load_profile, load_study
from repro.runners.calibrate import Calibration
from repro.runners.fidelity import Fidelity, FidelityCell
from results.records import RunInfo, read_run, run_key
from results.tables import build_table
from traces.schema import Trace


def run_fidelity(request: Request, cells: Sequence[str] = (), study: str | None = None) -> None:
    """Replay the trace under every cell, then print and write the fidelity tables.

    Args:
        cells: asked for one by one; else those of the ``study``, else the profile's.
    """
    console, notes = output_console(), Console(stderr=True)
    specs = _specs(request.profile, cells, study)
    for spec in specs:
        make_method(spec.method, spec.settings)
    setting = Setting(request, notes)
    trace = setting.replayed()
    opened = [_cell(setting, trace, spec) for spec in specs]
    fidelity = Fidelity(
        setting.adapter,
        trace,
        warm=setting.fidelity.warm,
        answer_tokens=setting.fidelity.answer_tokens,
        reference_prefix=setting.reference_prefix,
    )
    total, done = len(trace.workflows), 0
    with progress_bar(notes) as progress:
        task = progress.add_task(f"{len(opened)} cells, workflows", total=total)
        try:
            for done in fidelity.run(opened):
                progress.update(task, completed=done)
        except KeyboardInterrupt:
            progress.stop()
            notes.print(
                f"interrupted after {done} of {total} workflows; "
                "give the same command again to go on from there"
            )
            raise typer.Exit(INTERRUPTED) from None
    runs = [read_run(cell.directory) for cell, _ in opened]
    tables = request.out / (study or "tables")
    for number in ("fidelity", "fidelity-edges", "fidelity-layers"):
        table = build_table(number, runs)
        if number == "fidelity":
            print_table(console, table)
        write_table(table, tables)
    notes.print(f"records are in {request.out}, tables in {tables}")


def parse_cell(text: str) -> CellSpec:
    """``method key=value ...``; ``rho=``, ``rule=`` and ``accept_all=`` are the cell's own.

    Raises:
        UserError: not of this form.
    """
    name, *pairs = text.split()
    settings = parse_settings(pairs)
    own = {key: settings.pop(key) for key in ("rho", "rule", "accept_all") if key in settings}
    return CellSpec(method=name, settings=settings, **own)


def _specs(profile: str, cells: Sequence[str], study: str | None) -> tuple[CellSpec, ...]:
    if cells:
        return tuple(parse_cell(text) for text in cells)
    return load_study(study) if study else load_profile(profile).fidelity.cells


def _cell(setting: Setting, trace: Trace, spec: CellSpec) -> tuple[FidelityCell, RunInfo]:
    calibration = _calibrated(setting, spec)
    settings = make_method(spec.method, calibration.settings if calibration else spec.settings)
    shown = label(spec.method, spec.settings)
    if spec.rho is not None:
        shown = f"{shown} rho={spec.rho:g}".strip()
    if spec.rule is not None:
        shown = f"{shown} by {spec.rule}".strip()
    if spec.accept_all:
        shown = f"{shown} accept all".strip()
    parts, origin = setting.fidelity, trace.header.origin
    key = run_key(
        {
            **setting.identity,
            "kind": "fidelity",
            "trace": trace.header.sha256,
            "parts": [parts.warm, parts.calibration, parts.n, parts.answer_tokens],
            "method": spec.method,
            "settings": settings.settings(),
            "accept_all": spec.accept_all,
        }
    )
    directory = setting.request.out / "fidelity" / f"{spec.method.replace(':', '.')}-{key}"
    requests = [w.request for w in trace.workflows]
    info = RunInfo(
        run_key=key,
        created=datetime.now(UTC),
        kind="fidelity",
        bench=origin.get("bench", trace.header.kind),
        data=origin.get("data", "local"),
        data_sha256=origin.get("data_sha256", trace.header.sha256),
        method=spec.method,
        label=shown,
        settings=json.loads(json.dumps(settings.settings())),
        model=setting.resolved.name,
        model_revision=setting.resolved.revision,
        dtype=str(setting.adapter.spec.dtype).removeprefix("torch."),
        engine="transformers",
        attention="sdpa",
        device=setting.adapter.spec.device.type,
        hardware=env.hardware(),
        seed=0,
        sample_order_sha256=ids_sha256([ord(c) for r in requests for c in f"{r}\n"]),
        pool_state="warm" if parts.warm else "cold",
        n=len(trace.workflows),
        max_new_tokens=origin.get("max_new_tokens", 1),
        workflow=trace.header.topology,
        profile=setting.request.profile,
        environment=env.environment(),
        command=shlex.join(["repro", *sys.argv[1:]]),
    )
    cell = FidelityCell(
        spec.method, settings.settings(), shown, key, directory, accept_all=spec.accept_all
    )
    return cell, info


def _calibrated(setting: Setting, spec: CellSpec) -> Calibration | None:
    if spec.rho is None:
        return None
    return setting.calibrator.calibrate(spec.method, spec.settings, spec.rho, spec.rule)
