"""Cells of a single stream: one method on one shape of workflow, and the key of its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from baselines.selective import Selective
from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method
from repro.profiles.cells import CellSpec
from repro.runners.cells import variant
from repro.runners.serving.budgets import Budget, budget, cell_bound, schedule
from repro.runners.serving.pools import learns
from repro.runners.serving.workload import Workload
from repro.runners.stream.memory import needed_bytes
from repro.runners.stream.model import StreamModel
from results.records import run_key
from traces.schedule import Schedule
from traces.schema import TraceWorkflow


@dataclass(frozen=True)
class Stage:
    """A model with workflows of one shape.

    Attributes:
        agents: turns of a round.
        workload: has one workflow that fills pools and one that warms up.
        identity: what results depend on besides model, workload and cell.
    """

    model: StreamModel
    workload: Workload
    layout: Literal["T", "L0"]
    agents: int
    rounds: int
    seed: int
    identity: Mapping[str, Any]
    out: Path

    @property
    def name(self) -> str:
        """How tables call it."""
        rounds = f", R={self.rounds}" if self.rounds > 1 else ""
        return f"{self.workload.name}, N={self.agents}{rounds}"

    @property
    def longest(self) -> TraceWorkflow:
        """Any workflow: all have the same lengths."""
        return self.workload.workflows[0]

    @cached_property
    def full_identity(self) -> dict[str, Any]:
        """What makes two runs of a cell comparable."""
        spec = self.model.sketch.spec
        return {
            **self.identity,
            "model": self.model.revision or self.model.name,
            "dtype": str(spec.dtype),
            "trace": self.workload.sha256,
            "pool": self.workload.pool_sha256,
        }


@dataclass(frozen=True)
class Cell:
    """One method, or variant, on a stage.

    Attributes:
        label: what tells it from the method's defaults, as `repro fidelity` labels it.
        schedule: transitions that are dense; None leaves that to the method.
        bound: of the speed-up over NonShared.
    """

    stage: Stage
    method: str
    settings: Mapping[str, Any]
    label: str
    budget: Budget
    schedule: Schedule | None
    schedule_settings: Mapping[str, Any]
    bound: float | None
    key: str

    @property
    def directory(self) -> Path:
        """Where its records are."""
        return self.stage.out / "stream" / f"{self.method.replace(':', '.')}-{self.key}"

    @property
    def name(self) -> str:
        """Method and variant."""
        return f"{self.method} {self.label}".strip()

    @property
    def pool(self) -> Path | None:
        """Where the anchors of one workflow are kept; None for a method that learns nothing."""
        method = self.build()
        if not learns(method):
            return None
        key = run_key({**self.stage.full_identity, "settings": method.settings()})
        return self.stage.out / "pools" / f"{method.name}-1-{key}"

    def build(self) -> Method:
        """A new method object, with nothing learned."""
        return make_method(self.method, self.settings)

    @cached_property
    def needed_bytes(self) -> int:
        """Calculated: what the cell needs at most.

        Raises:
            UserError: settings whose bytes are not counted.
        """
        sketch = self.stage.model.sketch
        return needed_bytes(self.build(), self.stage.longest, sketch.spec, sketch.weight_bytes)

    def force(self, workflow: TraceWorkflow, position: int) -> dict[int, bool]:
        """Decisions taken beforehand for one turn, by segment."""
        if self.schedule is None:
            return {}
        turn = workflow.turns[position]
        return self.schedule.force(workflow.request, turn.node.name, turn.prompt)


def make_cells(stage: Stage, specs: Iterable[CellSpec]) -> list[Cell]:
    """The cells of a stage; equal ones once.

    Raises:
        UserError: an unknown method or setting, a ratio that a method cannot realise, or a cell
            that leaves its reuse to a gate.
    """
    cells = [_cell(stage, spec) for spec in specs]
    return list({cell.key: cell for cell in cells}.values())


def _cell(stage: Stage, spec: CellSpec) -> Cell:
    workflows = stage.workload.workflows
    make_method(spec.method, spec.settings)  # a wrong setting is named before a wrong ratio
    chosen = _budget(stage, spec, workflows)
    method = make_method(spec.method, {**chosen.settings, **spec.settings})
    made, schedule_settings = schedule(workflows, chosen, stage.seed)
    described = {
        "method": spec.method,
        "settings": method.settings(),
        "budget": [chosen.kind, chosen.rho],
        "schedule": schedule_settings,
    }
    return Cell(
        stage=stage,
        method=spec.method,
        settings=method.settings(),
        label=variant(spec),
        budget=chosen,
        schedule=made,
        schedule_settings=schedule_settings,
        bound=cell_bound(workflows, chosen, made, method),
        key=run_key({"kind": "stream", **stage.full_identity, **described}),
    )


def _budget(stage: Stage, spec: CellSpec, workflows: Sequence[TraceWorkflow]) -> Budget:
    """How the cell's reuse is set, and to what."""
    rho, layers = spec.rho, stage.model.sketch.spec.layers
    if spec.method in ("nonshared", "fullshared"):
        return budget(spec.method, 1.0, {}, "controlled", layers, workflows)
    if issubclass(find_method(spec.method), Selective):
        if rho is None:
            return Budget("budget", None, {})
        return budget(spec.method, rho, {rho: rho}, "controlled", layers, workflows)
    if rho is None and not spec.accept_all:
        raise UserError(
            f"{spec.method} {variant(spec)}: give rho=, or accept_all=true; copied anchors are all"
            " alike, so that no gate can tell them apart"
        )
    return budget(spec.method, 1.0 if rho is None else rho, {}, "controlled", layers, workflows)
