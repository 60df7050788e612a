"""What the commands on recorded trajectories share: a loaded model with a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

import workloads
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.session import Engine
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro import env
from repro.commands.console import follow
from repro.commands.options import Request
from repro.commands.settings import check_writable, choose_device, parse_settings
from repro.data import load_dataset
from repro.models import load, resolve
from repro.profiles import FidelityProfile, Profile, load_profile, override
from repro.runners.calibrate import Calibrator
from repro.runners.offline import Requests
from repro.runners.record import record_trace
from repro.runners.trajectory import Runner
from repro.runners.vision import Eyes, has_pictures
from results.records import run_key
from traces.schema import Trace, TraceWorkflow, read_trace
from workloads.chat import ChatFormat


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
        self.accuracy = accuracy = self.profile.accuracy.at(request.bench)
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
        accuracy, parts = self.accuracy, self.fidelity
        options = accuracy.workload.get(self.request.bench, {})
        workload = workloads.get(self.request.bench, **options)
        dataset = load_dataset(workload, self.data, split=accuracy.split, console=self.notes)
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
        samples = dataset.samples[:wanted]
        engine = Engine(self.adapter, NonShared())
        runner = Runner(engine, workload, self.chat, parts.max_new_tokens)
        if has_pictures(samples):
            runner = replace(runner, look=Eyes.of(self.model, self.resolved))
        described = f"recording {wanted} trajectories"
        record_trace(
            path,
            runner,
            samples,
            origin,
            lambda rows: follow(rows, described, wanted, self.notes),
        )
        return path

    @cached_property
    def calibrator(self) -> Calibrator:
        """A calibrator on the trace's warm-up and calibration workflows."""
        parts, workflows = self.fidelity, self.trace.workflows
        requests = Requests(
            self.adapter,
            self.trace.header.topology,
            workflows[: parts.warm],
            workflows[parts.warm : parts.warm + parts.calibration],
            self.reference_prefix,
            self.identity,
        )
        return Calibrator(
            requests, lambda step: self.notes.print(f"calibrating {step}", style="dim")
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


def run_record(request: Request) -> None:
    """Record a trace and print where it is."""
    notes = Console(stderr=True)
    typer.echo(Setting(request, notes).record())


def label(method: str, settings: Mapping[str, Any]) -> str:
    """Settings that differ from the method's defaults, as ``key=value``."""
    defaults = make_method(method).settings()
    return " ".join(f"{k}={v}" for k, v in settings.items() if v != defaults[k])
