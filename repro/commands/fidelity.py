"""`repro record`, `repro calibrate` and `repro fidelity`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable

import workloads
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.segments import ids_sha256
from kvcmas.engine.session import Engine
from kvcmas.errors import UserError
from kvcmas.registry import make_method, suggestion
from repro import env
from repro.commands.console import INTERRUPTED, output_console, progress_bar
from repro.commands.settings import check_writable, choose_device, parse_settings
from repro.commands.tables import print_table, write_table
from repro.models import load, resolve
from repro.profiles import CellSpec, FidelityProfile, Profile, load_profile, override
from repro.runners.calibrate import Calibration, Calibrator
from repro.runners.fidelity import Fidelity, FidelityCell
from repro.runners.record import record
from repro.runners.trajectory import Runner
from results.records import RunInfo, read_run, run_key
from results.tables import build_table
from traces.schema import Trace, TraceWorkflow, read_trace, write_trace
from workloads.chat import ChatFormat


@dataclass(frozen=True)
class Request:
    """What the three commands share; None means the profile decides."""

    bench: str
    model: str | None
    profile: str
    data: str | None
    trace: Path | None
    n: int | None
    warm: int | None
    calibration: int | None
    set: Sequence[str]
    cells: Sequence[str]
    out: Path
    study: str | None = None


class Setting:
    """A loaded model with a trace, recorded now if none was given."""

    def __init__(self, request: Request, notes: Console) -> None:
        self.request = request
        self.notes = notes
        self.profile: Profile = load_profile(request.profile)
        values = parse_settings(request.set)
        for key in ("n", "warm", "calibration"):
            if (value := getattr(request, key)) is not None:
                values[key] = value
        known = FidelityProfile.model_fields
        if unknown := [key for key in values if key not in known]:
            raise UserError(f"fidelity has no setting {unknown[0]!r}; known: {', '.join(known)}")
        self.fidelity = override(self.profile.fidelity, values)
        check_writable(request.out)
        accuracy = self.profile.accuracy
        self.data = request.data or accuracy.data
        self.resolved = resolve(request.model or accuracy.model, console=notes)
        device = choose_device(accuracy.device)
        self.model, self.tokenizer = load(self.resolved, dtype=accuracy.dtype, device=device)
        self.adapter = TransformersAdapter(self.model)
        eos = self.model.generation_config.eos_token_id
        self.chat = ChatFormat.from_tokenizer(
            self.tokenizer, [eos] if isinstance(eos, int) else eos or []
        )

    @property
    def reference_prefix(self) -> tuple[int, ...]:
        """BOS, else an end-of-turn token: an attention sink for context-free references."""
        bos = self.tokenizer.bos_token_id
        return (bos,) if isinstance(bos, int) else tuple(sorted(self.chat.stop_ids)[:1])

    @property
    def identity(self) -> dict[str, Any]:
        """What results depend on besides trace and method."""
        packages = env.environment()["packages"]
        return {
            "model": self.resolved.revision,
            "dtype": str(self.adapter.spec.dtype),
            "device": self.adapter.spec.device.type,
            "torch": packages["torch"],
            "transformers": packages["transformers"],
        }

    @cached_property
    def trace(self) -> Trace:
        """The trace to replay.

        Raises:
            UserError: a trace of another model, or one that is too short.
        """
        path = self.request.trace or self.record()
        trace = read_trace(path)
        revision = trace.header.origin.get("model_revision")
        if revision is not None and revision != self.resolved.revision:
            raise UserError(f"{path} was recorded with another model ({revision})")
        parts = self.fidelity
        if len(trace.workflows) < parts.warm + parts.calibration + 1:
            raise UserError(
                f"{path} has {len(trace.workflows)} workflows; {parts.warm} warm-up and"
                f" {parts.calibration} calibration ones leave none to evaluate"
            )
        return trace

    def record(self) -> Path:
        """Record NonShared trajectories on the bench, or find those recorded before."""
        accuracy, parts = self.profile.accuracy, self.fidelity
        options = accuracy.workload.get(self.request.bench, {})
        workload = workloads.get(self.request.bench, **options)
        dataset = workload.load(self.data, split=accuracy.split, seed=0)
        wanted = parts.warm + parts.calibration + parts.n
        if len(dataset.samples) < wanted:
            raise UserError(f"{dataset.label} has {len(dataset.samples)} samples, not {wanted}")
        origin = {
            "bench": workload.name,
            "data": dataset.source,
            "data_sha256": dataset.sha256,
            "samples": wanted,
            "max_new_tokens": parts.max_new_tokens,
            "model": self.resolved.name,
            "model_revision": self.resolved.revision,
            "chat_template_sha256": self.chat.sha256,
            "dtype": str(self.adapter.spec.dtype).removeprefix("torch."),
        }
        path = self.request.out / f"trace-{workload.name}-{run_key(origin)}.jsonl"
        if path.exists():
            return path
        runner = Runner(
            Engine(self.adapter, NonShared()), workload, self.chat, parts.max_new_tokens
        )
        samples = dataset.samples[:wanted]
        partial = path.with_suffix(".partial")
        rows = record(runner, samples, partial)
        described = f"recording {len(samples)} trajectories"
        recorded = list(track(rows, described, total=len(samples), console=self.notes))
        write_trace(
            path,
            recorded,
            kind="recorded",
            topology=workload.workflow.name,
            vocab=self.adapter.spec.vocab,
            origin=origin,
        )
        partial.unlink(missing_ok=True)
        return path

    def calibrator(self) -> Calibrator:
        """A calibrator on the trace's warm-up and calibration workflows."""
        parts, workflows = self.fidelity, self.trace.workflows
        return Calibrator(
            self.adapter,
            self.trace.header.topology,
            workflows[: parts.warm],
            workflows[parts.warm : parts.warm + parts.calibration],
            reference_prefix=self.reference_prefix,
            identity=self.identity,
            on_step=lambda step: self.notes.print(f"calibrating {step}", style="dim"),
        )

    def replayed(self) -> Trace:
        """Warm-up workflows, then the evaluated ones; calibration ones are left out."""
        parts, workflows = self.fidelity, self.trace.workflows
        start = parts.warm + parts.calibration
        kept: tuple[TraceWorkflow, ...] = (
            *workflows[: parts.warm],
            *workflows[start : start + parts.n],
        )
        return self.trace.model_copy(update={"workflows": kept})

    def cells(self) -> list[CellSpec]:
        """The cells asked for, one by one or as a named study; else the profile's."""
        if self.request.cells:
            return [parse_cell(text) for text in self.request.cells]
        if self.request.study is None:
            return list(self.fidelity.cells)
        studies = self.fidelity.studies
        if self.request.study not in studies:
            known = suggestion(self.request.study, tuple(studies))
            raise UserError(f"profile {self.request.profile} has no study of that name{known}")
        return list(studies[self.request.study])


def parse_cell(text: str) -> CellSpec:
    """``method key=value ...``; ``rho=`` and ``accept_all=`` are the cell's, the rest are settings.

    Raises:
        UserError: not of this form.
    """
    name, *pairs = text.split()
    settings = parse_settings(pairs)
    own = {key: settings.pop(key) for key in ("rho", "accept_all") if key in settings}
    return CellSpec(method=name, settings=settings, **own)


def run_record(request: Request) -> None:
    """Record a trace and print where it is."""
    notes = Console(stderr=True)
    typer.echo(Setting(request, notes).record())


def run_calibrate(request: Request, methods: str, target: float) -> None:
    """Calibrate methods for a target rho, print what was found and write every curve."""
    console, notes = output_console(), Console(stderr=True)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    for name in names:
        make_method(name)
    setting = Setting(request, notes)
    calibrator = setting.calibrator()
    found = [calibrator.calibrate(name, {}, target) for name in names]
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("method", "target rho", "realised rho", "settings other than defaults"):
        table.add_column(heading, overflow="fold")
    for result in found:
        rho = "closed form" if result.rho is None else f"{result.rho:.3f}"
        table.add_row(result.method, f"{target:.2f}", rho, _label(result.method, result.settings))
    console.print(table)
    path = request.out / f"calibration-{target:g}.json"
    curves = {r.method: [[p.threshold, p.rho] for p in r.curve] for r in found if r.curve}
    settings = {r.method: r.settings for r in found}
    try:
        path.write_text(json.dumps({"settings": settings, "curves": curves}, indent=2))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    notes.print(f"curves are in {path}")


def run_fidelity(request: Request) -> None:
    """Replay the trace under every cell, then print and write the fidelity tables."""
    console, notes = output_console(), Console(stderr=True)
    specs = [parse_cell(text) for text in request.cells]
    for spec in specs:
        make_method(spec.method, spec.settings)
    setting = Setting(request, notes)
    trace = setting.replayed()
    cells = [_cell(setting, trace, spec) for spec in setting.cells()]
    fidelity = Fidelity(
        setting.adapter,
        trace,
        warm=setting.fidelity.warm,
        answer_tokens=setting.fidelity.answer_tokens,
        reference_prefix=setting.reference_prefix,
    )
    total, done = len(trace.workflows), 0
    with progress_bar(notes) as progress:
        task = progress.add_task(f"{len(cells)} cells, workflows", total=total)
        try:
            for done in fidelity.run(cells):
                progress.update(task, completed=done)
        except KeyboardInterrupt:
            progress.stop()
            notes.print(
                f"interrupted after {done} of {total} workflows; "
                "give the same command again to go on from there"
            )
            raise typer.Exit(INTERRUPTED) from None
    runs = [read_run(cell.directory) for cell, _ in cells]
    tables = request.out / (request.study or "tables")
    for number in ("fidelity", "fidelity-edges", "fidelity-layers"):
        table = build_table(number, runs)
        if number == "fidelity":
            print_table(console, table)
        write_table(table, tables)
    notes.print(f"records are in {request.out}, tables in {tables}")


def _cell(setting: Setting, trace: Trace, spec: CellSpec) -> tuple[FidelityCell, RunInfo]:
    calibration = _calibrated(setting, spec)
    settings = make_method(spec.method, calibration.settings if calibration else spec.settings)
    label = _label(spec.method, spec.settings)
    if spec.rho is not None:
        label = f"{label} rho={spec.rho:g}".strip()
    if spec.accept_all:
        label = f"{label} accept all".strip()
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
        label=label,
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
        spec.method, settings.settings(), label, key, directory, accept_all=spec.accept_all
    )
    return cell, info


def _calibrated(setting: Setting, spec: CellSpec) -> Calibration | None:
    if spec.rho is None:
        return None
    return setting.calibrator().calibrate(spec.method, spec.settings, spec.rho)


def _label(method: str, settings: Mapping[str, Any]) -> str:
    defaults = make_method(method).settings()
    return " ".join(f"{k}={v}" for k, v in settings.items() if v != defaults[k])
