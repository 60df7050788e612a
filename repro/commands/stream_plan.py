"""From profile and command line to the stages and cells of `repro stream`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcmas.errors import UserError
from kvcmas.registry import suggestion
from repro.commands.fidelity import parse_cell
from repro.commands.settings import parse_settings
from repro.commands.traces import tokens_of
from repro.profiles import CellSpec, load_profile, load_study, override
from repro.profiles.stream import StreamPart, StreamProfile, StreamShape
from repro.runners.cells import apply_settings
from repro.runners.serving.workload import generated
from repro.runners.stream.cells import Cell, Stage, make_cells
from repro.runners.stream.model import StreamModel
from traces.generator import GeneratorSettings, Seeds


@dataclass(frozen=True)
class Request:
    """The command line of `repro stream`; None means the profile decides."""

    parts: str | None = None
    study: str | None = None
    ctx: str | None = None
    methods: str | None = None
    rho: str | None = None
    agents: str | None = None
    rounds: str | None = None
    model: str | None = None
    load: str | None = None
    layout: str | None = None
    scale: float | None = None
    outputs: int | None = None
    workflows: int | None = None
    cells: Sequence[str] = ()
    memory_limit: str | None = None
    profile: str = "smoke"
    set: Sequence[str] = ()
    out: Path = Path("runs")
    resume: bool = True
    dry_run: bool = False


@dataclass(frozen=True)
class Sweep:
    """One shape with its cells, before anything is opened."""

    shape: StreamShape
    agents: int
    rounds: int
    workflows: int
    cells: tuple[CellSpec, ...]


def stream_profile(request: Request) -> tuple[StreamProfile, dict[str, Any]]:
    """The profile with the command line on top, and what ``--set`` says about methods.

    Raises:
        UserError: an unknown profile or a wrong value.
    """
    values = parse_settings(request.set)
    top = {k: values.pop(k) for k in list(values) if k in StreamProfile.model_fields}
    for key in ("layout", "outputs", "memory_limit"):
        if (value := getattr(request, key)) is not None:
            top[key] = value
    return override(load_profile(request.profile).stream, top), values


def sweeps(request: Request, profile: StreamProfile, settings: Mapping[str, Any]) -> list[Sweep]:
    """Everything to be run, part by part.

    Raises:
        UserError: a part, study, method, setting or number that is not there or not possible.
    """
    found = []
    for part in _parts(request, profile):
        specs = _specs(request, part, settings)
        for shape in _shapes(request, part):
            for agents in _numbers(request.agents, part.agents, "agents"):
                for rounds in _numbers(request.rounds, part.rounds, "rounds"):
                    found.append(Sweep(shape, agents, rounds, part.workflows, tuple(specs)))
    if not any(sweep.cells for sweep in found):
        raise UserError("no part of the profile has such a cell; give it with --cell")
    return found


def cells_of(
    todo: Sequence[Sweep],
    profile: StreamProfile,
    models: Callable[[StreamShape], StreamModel],
    identity: Mapping[str, Any],
    out: Path,
) -> list[Cell]:
    """Stages with their cells; a cell that several parts name is there once.

    Raises:
        UserError: a cell that cannot be made.
    """
    cells: dict[str, Cell] = {}
    for sweep in todo:
        model = models(sweep.shape)
        settings = GeneratorSettings(
            vocab=model.sketch.vocabulary.size,
            layout=profile.layout,
            shared=tokens_of(sweep.shape.ctx),
            output=profile.outputs,
            workflows=sweep.workflows,
            agents=sweep.agents,
            rounds=sweep.rounds,
            scale=sweep.shape.scale,
            seeds=Seeds.all(profile.seed),
            exclude=model.sketch.vocabulary.special,
        )
        stage = Stage(
            model=model,
            workload=generated(settings, 1, out / "traces"),
            layout=profile.layout,
            agents=sweep.agents,
            rounds=sweep.rounds,
            seed=profile.seed,
            identity=identity,
            out=out,
        )
        for cell in make_cells(stage, sweep.cells):
            cells.setdefault(cell.key, cell)
    return list(cells.values())


def _parts(request: Request, profile: StreamProfile) -> list[StreamPart]:
    chosen = _named_parts(request, profile)
    if request.workflows is not None:
        chosen = [override(part, {"workflows": request.workflows}) for part in chosen]
    return chosen


def _named_parts(request: Request, profile: StreamProfile) -> list[StreamPart]:
    """Those of ``--part``; the one of a study, or its cells where the first part is longest."""
    if request.study is not None:
        load_study(request.study)
        first = next(iter(profile.parts.values()))
        own = [part for part in profile.parts.values() if part.study == request.study]
        longest = max(first.at, key=lambda shape: tokens_of(shape.ctx))
        return own or [override(first, {"at": (longest,), "cells": (), "study": request.study})]
    names = list(profile.parts)
    if request.parts is not None:
        names = [name.strip() for name in request.parts.split(",")]
    elif request.cells:
        names = names[:1]
    for name in names:
        if name not in profile.parts:
            known = tuple(profile.parts)
            raise UserError(f"the profile has no part {name!r}{suggestion(name, known)}")
    return [profile.parts[name] for name in names]


def _specs(request: Request, part: StreamPart, settings: Mapping[str, Any]) -> list[CellSpec]:
    specs = list(part.cells) if part.study is None else list(load_study(part.study))
    if request.cells:
        specs = [parse_cell(text) for text in request.cells]
    if request.methods is not None:
        names = [name.strip() for name in request.methods.split(",")]
        specs = [spec for spec in specs if spec.method in names]
    if request.rho is not None:
        ratios = [_number(text, float, "rho") for text in request.rho.split(",")]
        specs = [
            override(spec, {"rho": rho})
            for spec in specs
            for rho in (ratios if spec.rho is not None else [None])
        ]
    return apply_settings(specs, settings) if specs else specs


def _shapes(request: Request, part: StreamPart) -> list[StreamShape]:
    shapes = list(part.at)
    if request.ctx is not None:
        wanted = [text.strip() for text in request.ctx.split(",")]
        known = {shape.ctx: shape for shape in shapes}
        last = shapes[-1]
        shapes = [known.get(ctx) or override(last, {"ctx": ctx}) for ctx in wanted]
    changes = {
        key: value
        for key in ("model", "load", "scale")
        if (value := getattr(request, key)) is not None
    }
    return [override(shape, changes) for shape in shapes]


def _numbers(text: str | None, known: tuple[int, ...], option: str) -> list[int]:
    if text is None:
        return list(known)
    return [int(_number(part, int, option)) for part in text.split(",")]


def _number(text: str, convert: type[float] | type[int], option: str) -> float:
    try:
        return convert(text)
    except ValueError:
        raise UserError(f"--{option}: {text!r} is no number") from None
