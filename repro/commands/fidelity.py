"""`repro fidelity`: the cells of one replay, their records and tables."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
import typer
from rich.console import Console

from kvcmas.engine.segments import ids_sha256
from kvcmas.registry import make_method
from repro import env
from repro.commands.console import INTERRUPTED, PLAIN_WIDTH, output_console, progress_bar
from repro.commands.options import Request
from repro.commands.recorded import Setting, label
from repro.commands.settings import parse_settings
from repro.commands.tables import print_table, write_table
from repro.profiles import CellSpec, load_profile, load_study
from repro.runners.calibrate import ALWAYS
from repro.runners.fidelity import Fidelity, FidelityCell
from repro.runners.shares import Tell, failure, run_shares, split
from results.records import Run, RunInfo, read_run, run_key
from results.schema import DataLabel
from results.tables import build_table
from traces.generator import GeneratorSettings, write_generated
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
    replayed = _Replayed.recorded(setting)
    _spread(setting, replayed, specs)
    calibrated = [_Cell.of(setting, spec) for spec in specs]
    runs = _run(setting, replayed, calibrated)
    tables = request.out / (study or "tables")
    for number in ("fidelity", "fidelity-edges", "fidelity-layers"):
        table = build_table(number, runs)
        if number == "fidelity":
            print_table(console, table)
        write_table(table, tables)
    if setting.fidelity.timing is not None and study is None:
        timed = _run(setting, _Replayed.timed(setting), [cell.open() for cell in calibrated])
        table = build_table("ttft", timed)
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


@dataclass(frozen=True)
class _Cell:
    """A cell with the settings that its calibration found."""

    method: str
    settings: Mapping[str, Any]
    label: str
    accept_all: bool

    @classmethod
    def of(cls, setting: Setting, spec: CellSpec) -> _Cell:
        settings: Mapping[str, Any] = spec.settings
        if spec.rho is not None:
            calibrator = setting.calibrator
            settings = calibrator.calibrate(spec.method, settings, spec.rho, spec.rule).settings
        parts = (
            label(spec.method, spec.settings),
            "" if spec.rho is None else f"rho={spec.rho:g}",
            "" if spec.rule is None else f"by {spec.rule}",
            "accept all" if spec.accept_all else "",
        )
        whole = make_method(spec.method, settings).settings()
        return cls(spec.method, whole, " ".join(filter(None, parts)), spec.accept_all)

    def open(self) -> _Cell:
        """The same with a gate that accepts whatever it is asked, and still asks."""
        return replace(self, settings={**self.settings, **ALWAYS.get(self.method, {})})


@dataclass(frozen=True)
class _Replayed:
    """What is replayed: workflows, of which the first only fill pools, and what they are."""

    kind: str
    bench: str
    data: DataLabel
    data_sha256: str
    trace: Trace
    warm: int
    max_new_tokens: int
    parts: tuple[int, ...]

    @classmethod
    def recorded(cls, setting: Setting) -> _Replayed:
        trace, parts = setting.replayed(), setting.fidelity
        origin = trace.header.origin
        return cls(
            "fidelity",
            origin.get("bench", trace.header.kind),
            origin.get("data", "local"),
            origin.get("data_sha256", trace.header.sha256),
            trace,
            parts.warm,
            origin.get("max_new_tokens", 1),
            (parts.warm, parts.calibration, parts.n, parts.answer_tokens),
        )

    @classmethod
    def timed(cls, setting: Setting) -> _Replayed:
        timing = setting.fidelity.timing
        if timing is None:
            raise ValueError("the profile times nothing")
        settings = GeneratorSettings(
            vocab=setting.adapter.spec.vocab,
            layout="L0",
            shared=timing.shared,
            output=1,
            workflows=timing.warm + timing.n,
            agents=2,
        )
        trace = write_generated(setting.request.out / f"trace-L0-{timing.shared}.jsonl", settings)
        parts = (timing.warm, timing.n)
        sha256 = trace.header.sha256
        bench = f"L0 {timing.shared}"
        return cls("fidelity-timing", bench, "procedural", sha256, trace, timing.warm, 1, parts)


def _spread(setting: Setting, replayed: _Replayed, specs: Sequence[CellSpec]) -> None:
    """Calibrate and replay in several processes, so that nothing is left but to read it.

    Whatever one of them has not done is done, and its error met, by the process that reads.
    """
    parts = split(specs, setting.fidelity.jobs, setting.adapter.spec.device.type)
    if not parts:
        return
    jobs = len(parts)
    shares = [(setting.request, part, threads) for part, threads in parts]
    done = [0] * jobs
    what = f"{replayed.bench}: {len(specs)} cells in {jobs} processes, workflows"
    with _progress(setting, what, jobs * len(replayed.trace.workflows), replayed.bench) as update:

        def heard(share: int, message: object) -> None:
            if isinstance(message, int):
                done[share] = message
                update(sum(done))
            else:
                setting.notes.print(message, style="dim", markup=False)

        if failed := run_shares(_share, shares, heard):
            setting.notes.print(failure(failed, jobs))


def _share(request: Request, specs: Sequence[CellSpec], threads: int, tell: Tell) -> None:
    """Calibrate and replay some of the cells; records and what was found lie in files."""
    torch.set_num_threads(threads)
    setting = Setting(request, Console(file=_Told(tell), width=PLAIN_WIDTH))
    replayed = _Replayed.recorded(setting)
    opened = [_open(setting, replayed, _Cell.of(setting, spec)) for spec in specs]
    for done in _replay(setting, replayed, opened):
        tell(done)


class _Told(io.StringIO):
    """A console's lines, told to another process."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell

    def write(self, text: str) -> int:
        if line := text.strip():
            self._tell(line)
        return len(text)


def _run(setting: Setting, replayed: _Replayed, cells: Sequence[_Cell]) -> list[Run]:
    """Replay under every cell, with progress; Ctrl-C leaves what is done."""
    opened = [_open(setting, replayed, cell) for cell in cells]
    what = f"{replayed.bench}: {len(opened)} cells, workflows"
    with _progress(setting, what, len(replayed.trace.workflows), replayed.bench) as update:
        for done in _replay(setting, replayed, opened):
            update(done)
    return [read_run(cell.directory) for cell, _ in opened]


@contextmanager
def _progress(
    setting: Setting, what: str, total: int, bench: str
) -> Iterator[Callable[[int], None]]:
    """A bar to update with what is done; after Ctrl-C, what was done and how to go on."""
    done = 0
    with progress_bar(setting.notes) as progress:
        task = progress.add_task(what, total=total)

        def update(count: int) -> None:
            nonlocal done
            done = count
            progress.update(task, completed=count)

        try:
            yield update
        except KeyboardInterrupt:
            progress.stop()
            setting.notes.print(
                f"interrupted after {done} of {total} workflows of {bench}; "
                "give the same command again to go on from there"
            )
            raise typer.Exit(INTERRUPTED) from None


def _replay(
    setting: Setting, replayed: _Replayed, opened: Sequence[tuple[FidelityCell, RunInfo]]
) -> Iterator[int]:
    """Replay what is missing; yields how many workflows all cells have."""
    fidelity = Fidelity(
        setting.adapter,
        replayed.trace,
        warm=replayed.warm,
        answer_tokens=setting.fidelity.answer_tokens,
        reference_prefix=setting.reference_prefix,
    )
    return fidelity.run(opened)


def _open(setting: Setting, replayed: _Replayed, cell: _Cell) -> tuple[FidelityCell, RunInfo]:
    settings = dict(cell.settings)
    learns = make_method(cell.method, settings).learns
    workflows = replayed.trace.workflows[0 if learns else replayed.warm :]
    key = run_key(
        {
            **setting.identity,
            "kind": replayed.kind,
            "trace": replayed.trace.header.sha256,
            "parts": replayed.parts,
            "warmed": learns,
            "method": cell.method,
            "settings": settings,
            "accept_all": cell.accept_all,
        }
    )
    directory = setting.request.out / replayed.kind / f"{cell.method.replace(':', '.')}-{key}"
    info = RunInfo(
        run_key=key,
        created=datetime.now(UTC),
        kind=replayed.kind,
        bench=replayed.bench,
        data=replayed.data,
        data_sha256=replayed.data_sha256,
        method=cell.method,
        label=cell.label,
        settings=json.loads(json.dumps(settings)),
        model=setting.resolved.name,
        model_revision=setting.resolved.revision,
        dtype=str(setting.adapter.spec.dtype).removeprefix("torch."),
        engine="transformers",
        attention="sdpa",
        device=setting.adapter.spec.device.type,
        hardware=env.hardware(),
        seed=0,
        sample_order_sha256=ids_sha256([ord(c) for w in workflows for c in f"{w.request}\n"]),
        pool_state="warm" if learns and replayed.warm else "cold",
        n=len(workflows),
        max_new_tokens=replayed.max_new_tokens,
        workflow=replayed.trace.header.topology,
        profile=setting.request.profile,
        environment=env.environment(),
        command=shlex.join(["repro", *sys.argv[1:]]),
    )
    opened = FidelityCell(cell.method, settings, cell.label, key, directory, cell.accept_all)
    return opened, info
