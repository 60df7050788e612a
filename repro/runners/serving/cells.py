"""Cells: one method under one load, and the key of everything that changes its result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcmas.engine.contract import Method
from kvcmas.registry import make_method
from repro.profiles.serve import Law, ServeMethod, ServeProfile
from repro.runners.emulation.costs import Emulated
from repro.runners.serving.budgets import Budget, budget, cell_bound, schedule
from repro.runners.serving.capacity import Capacity, paper_capacity
from repro.runners.serving.engine import Request
from repro.runners.serving.pools import learns
from repro.runners.serving.workload import Workload, sources_of
from results.records import run_key
from traces.arrival import Arrival, arrivals
from traces.schedule import Schedule


@dataclass(frozen=True)
class Study:
    """What all cells of one context share.

    Attributes:
        profile: with the command line on top of it.
        identity: what results depend on besides the cell: model, engine, packages, hardware.
        capacity: NonShared's, here; None where only the cells are of interest (dry run).
        recorded: real arrival times, for the law ``azure``.
    """

    profile: ServeProfile
    workload: Workload
    layers: int
    identity: Mapping[str, Any]
    capacity: Capacity | None
    out: Path
    recorded: Path | None = None

    @property
    def time_scale(self) -> float:
        """Seconds here for one of the paper's machine; 1 for raw rates.

        Raises:
            ValueError: it follows from a capacity that is not known.
        """
        if self.profile.time_scale != "auto":
            return self.profile.time_scale
        if self.capacity is None:
            raise ValueError("the time scale needs NonShared's capacity")
        return paper_capacity(self.workload.prompts) / self.capacity.requests_per_s


@dataclass(frozen=True)
class Cell:
    """One method (or variant) under one load.

    Attributes:
        label: what tells the variant from the method's defaults.
        schedule: the transitions that are dense; None leaves them to the method.
        seed: of arrivals and schedule; repeats differ in nothing else.
        pool: name of the warm pool the cell starts from; ``fresh`` for an empty one.
        emulated: what is served in the method's place; None serves the method itself.
    """

    study: Study
    method: str
    settings: Mapping[str, Any]
    label: str
    budget: Budget
    schedule: Schedule | None
    schedule_settings: Mapping[str, Any]
    bound: float | None
    rho: float
    law: Law
    qps: float
    seed: int
    pool: str
    key: str
    emulated: Emulated | None = None

    @property
    def kind(self) -> str:
        """Kind of its run."""
        return "serve" if self.emulated is None else "emulate"

    @property
    def directory(self) -> Path:
        """Where its records are."""
        return self.study.out / self.kind / f"{self.method.replace(':', '.')}-{self.key}"

    @property
    def name(self) -> str:
        """Method and variant."""
        return f"{self.method} {self.label}".strip()

    @property
    def plain_settings(self) -> dict[str, Any]:
        """Settings as JSON has them: tuples are lists."""
        return json.loads(json.dumps(self.settings))

    @property
    def shape(self) -> str:
        """Cells of one shape run the same code on the same lengths: one of them warms up."""
        return f"{self.name} {self.budget.rho} {self.study.workload.name}"

    def build(self) -> Method:
        """A new method object, with nothing learned, or what stands for it."""
        return self.emulated or make_method(self.method, self.settings)

    def requests(self) -> tuple[Request, ...]:
        """The trace's requests as this cell decides them."""
        waits = self.build().wants.sources
        found = []
        for workflow in self.study.workload.workflows:
            needs = sources_of(workflow)
            for position, turn in enumerate(workflow.turns):
                prompt, node = turn.prompt, turn.node.name
                force = self.schedule.force(workflow.request, node, prompt) if self.schedule else {}
                found.append(
                    Request(workflow, turn, position, prompt, force, needs[node] if waits else ())
                )
        return tuple(found)

    def arrivals(self) -> tuple[Arrival, ...]:
        """When they arrive, in seconds of this machine."""
        rate = self.qps / self.study.time_scale
        return arrivals(
            self.study.workload.workflows,
            self.law,
            rate,
            seed=self.seed,
            recorded=self.study.recorded if self.law == "azure" and rate else None,
        )


def make_cells(study: Study, methods: Sequence[ServeMethod]) -> list[Cell]:
    """All cells of a study, a method's one after another so that its pool is loaded once.

    Raises:
        UserError: an unknown method or setting, or a ratio that a method cannot realise.
    """
    profile = study.profile
    cells = []
    for rho in profile.rho:
        for spec in methods:
            for law, rates in profile.arrival.items():
                for qps in rates:
                    for repeat in range(profile.repeats):
                        cells.append(_cell(study, spec, rho, law, qps, profile.seed + repeat))
    # NonShared and FullShared are the same at every ratio.
    return list({cell.key: cell for cell in cells}.values())


def label(method: str, settings: Mapping[str, Any]) -> str:
    """The settings that are not the method's defaults, as text."""
    defaults = make_method(method).settings()
    return " ".join(f"{k}={v}" for k, v in settings.items() if v != defaults[k])


def _cell(study: Study, spec: ServeMethod, rho: float, law: Law, qps: float, seed: int) -> Cell:
    profile, workload = study.profile, study.workload
    make_method(spec.method, spec.settings)  # a wrong setting is named before a wrong ratio
    chosen = budget(
        spec.method, rho, profile.selective_rho, profile.gate, study.layers, workload.workflows
    )
    method = make_method(spec.method, {**chosen.settings, **spec.settings})
    made, schedule_settings = schedule(workload.workflows, chosen, seed)
    known = study.capacity is not None
    rho = {"none": 0.0, "all": 1.0}.get(chosen.kind, rho)
    described = {
        "trace": workload.sha256,
        "method": spec.method,
        "settings": method.settings(),
        "budget": [chosen.kind, chosen.rho],
        "rho": rho,
        "schedule": schedule_settings,
        "arrival": [law, qps, study.time_scale if known else None, seed, str(study.recorded or "")],
        "clock": profile.clock,
        "decode": profile.decode,
        "slo": [profile.slo_ttft_s, profile.slo_inter_token_s],
        "pool": profile.pool,
    }
    return Cell(
        study=study,
        method=spec.method,
        settings=method.settings(),
        label=label(spec.method, spec.settings),
        budget=chosen,
        schedule=made,
        schedule_settings=schedule_settings,
        bound=cell_bound(workload.workflows, chosen, made, method),
        rho=rho,
        law=law,
        qps=qps,
        seed=seed,
        pool=_pool_name(study, method),
        key=run_key({"kind": "serve", **study.identity, **described}),
    )


def _pool_name(study: Study, method: Method) -> str:
    """Pools depend on the method's settings, the agents and what filled them, not on the load."""
    pool = study.workload.pool
    if not (pool and learns(method)):
        return "fresh"
    key = run_key(
        {
            **study.identity,
            "settings": method.settings(),
            "workflows": study.workload.pool_sha256,
        }
    )
    return f"{method.name}-{len(pool)}-{key}"
