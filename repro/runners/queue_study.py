"""Studies with the queue model: every method under every load on a GPU; a check against runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from repro.profiles.serve import Law, ServeMethod, ServeProfile
from repro.runners.hop_costs import Gpu, HopCosts, Utilisation
from repro.runners.modelled import predicted, store_simulated
from repro.runners.queue_model import kinds, measured_services, simulate, ttfts
from repro.runners.serving import budgets
from repro.runners.serving.capacity import LLAMA_8B
from repro.runners.serving.cells import Cell, Study, make_cells
from repro.runners.serving.memory import needed_bytes
from repro.runners.serving.workload import Workload
from results import stats
from results.records import Run
from results.serving import EXACT, ServedCell, served_cells, too_few
from traces import GeneratorSettings, TraceWorkflow, even_schedule, generate

ScheduleName = Literal["controlled", "even"]

# A trace needs ids, the model only their number.
VOCAB: Final = 1000


@dataclass(frozen=True)
class Modelled:
    """One method under one load on a GPU. Nothing in it was measured.

    Attributes:
        p50_s: TTFT over all requests of all repeats; NaN where the cell does not fit the memory.
        speedup_p50: NonShared's percentile over this one under the same load.
        work_bound: see :mod:`traces.bounds`.
        needed_gb: weights, live caches and full pools.
    """

    label: str
    gpu: str
    model: str
    trace: str
    rho: float
    schedule: str
    method: str
    variant: str
    arrival: str
    qps: float
    requests: int
    p50_s: float
    p90_s: float
    speedup_p50: float
    speedup_p90: float
    work_bound: float
    needed_gb: float
    out_of_memory: bool


@dataclass(frozen=True)
class Skipped:
    """A served cell that the model says nothing about."""

    name: str
    reason: str


def workload(settings: GeneratorSettings) -> Workload:
    """A generated trace that is written nowhere and fills no pools."""
    workflows = generate(settings)
    return Workload(
        layout=settings.layout,
        shared=settings.shared,
        output=settings.output,
        scale=settings.scale,
        topology=settings.graph.name,
        workflows=workflows,
        pool=(),
        warm_up=workflows[0],
        prompts=tuple(len(turn.prompt) for turn in workflows[0].turns),
        sha256="",
    )


def predict(
    profile: ServeProfile,
    settings: GeneratorSettings,
    costs: HopCosts,
    gpu: Gpu,
    used: Utilisation,
    *,
    schedule: ScheduleName = "controlled",
    step_rows: int | None = None,
    records: Path | None = None,
) -> list[Modelled]:
    """Every method of ``profile`` under its loads with Llama-3.1-8B on ``gpu``.

    Args:
        schedule: ``even`` gives delta methods the public harness's schedule.
        step_rows: see :class:`~repro.runners.queue_model.ModelEngine`.
        records: folder for a run of each cell and repeat.

    Raises:
        UserError: no NonShared to compare with, or a ratio that a method cannot realise.
    """
    if EXACT not in (spec.method for spec in profile.methods):
        raise UserError(f"speed-ups are over {EXACT}: it has to be among the methods")
    loads = [(law, qps) for law, rates in profile.arrival.items() for qps in rates]
    # Nothing but arrivals depends on the load, and nothing but them and the schedule on the repeat:
    # one cell of each method stands for all.
    law, qps = loads[0]
    once = profile.model_copy(update={"arrival": {law: (qps,)}, "repeats": 1})
    study = _study(once, workload(settings), LLAMA_8B.layers)
    rows: list[Modelled] = []
    for cell in make_cells(study, once.methods):
        method = cell.build()
        seeds = range(profile.seed, profile.seed + profile.repeats)
        cells = [_planned(cell, method, schedule, seed) for seed in seeds]
        needed = _needed_gb(study.workload.workflows[0], method, costs)
        served = []
        for repeat in cells if needed <= gpu.memory_gb else ():
            requests = repeat.requests()
            services = costs.services(repeat, method, requests, gpu, used)
            served.append((repeat, requests, services))
        for law, qps in loads:
            times: list[float] = []
            for repeat, requests, services in served or [(one, (), {}) for one in cells]:
                loaded = replace(repeat, law=law, qps=qps)
                due = loaded.arrivals() if requests else ()
                answered = simulate(requests, due, services, step_rows=step_rows)
                times += ttfts(answered)
                if records is not None:
                    store_simulated(records, loaded, answered, services, costs, gpu, used, needed)
            rows.append(_modelled(cells, gpu, law, qps, times, needed))
    dense = {(row.arrival, row.qps): row for row in rows if row.method == EXACT}
    return [
        replace(
            row,
            speedup_p50=dense[row.arrival, row.qps].p50_s / row.p50_s,
            speedup_p90=dense[row.arrival, row.qps].p90_s / row.p90_s,
        )
        for load in loads
        for row in rows
        if (row.arrival, row.qps) == load
    ]


def _modelled(
    cells: Sequence[Cell], gpu: Gpu, law: Law, qps: float, times: Sequence[float], needed: float
) -> Modelled:
    first = cells[0]
    return Modelled(
        label="modelled",
        gpu=gpu.name,
        model="llama-3.1-8b",
        trace=first.study.workload.name,
        rho=first.rho,
        schedule=str(first.schedule_settings.get("schedule", "")),
        method=first.method,
        variant=first.label,
        arrival=law,
        qps=qps,
        requests=len(times),
        p50_s=stats.percentile(times, 50),
        p90_s=_percentile(times, 90),
        speedup_p50=math.nan,
        speedup_p90=math.nan,
        work_bound=_together([cell.bound for cell in cells]),
        needed_gb=needed,
        out_of_memory=needed > gpu.memory_gb,
    )


def _needed_gb(workflow: TraceWorkflow, method: Method, costs: HopCosts) -> float:
    """Memory of a cell with full pools. Embeddings are read by row, but held whole."""
    held = costs.weight_bytes + LLAMA_8B.hidden * LLAMA_8B.vocab * LLAMA_8B.dtype.itemsize
    return needed_bytes(method, workflow, LLAMA_8B, held) / 1e9


def validate(runs: Iterable[Run]) -> Iterator[Run | Skipped]:
    """Predict every served cell under load from the single stream of the same method, run by run.

    Raises:
        TableError: runs that are no served ones, or claim the same cell.
    """
    cells = served_cells(runs)
    for cell in cells:
        if cell.key.load.qps == 0:
            continue
        key = cell.key
        name = f"{key.method} {key.label}".strip()
        where = f"{name}, {key.load.bench}, {key.load.arrival} {key.load.qps:g} QPS"
        try:
            yield from _predicted(cell, cells)
        except UserError as error:
            yield Skipped(where, str(error))


def _predicted(cell: ServedCell, cells: Sequence[ServedCell]) -> list[Run]:
    key, load = cell.key, cell.key.load
    if cell.out_of_memory or not cell.requests:
        raise UserError("it has no answered request")
    if cell.serve.layout == "recorded" or load.arrival == "azure":
        raise UserError("its trace or its arrivals are not in the records")
    alone = [
        row
        for other in cells
        if other.key.load.qps == 0
        and other.key._replace(load=load) == key
        and other.key.load._replace(arrival=load.arrival, qps=load.qps) == load
        for row in other.requests.values()
    ]
    if not alone:
        raise UserError("no single-stream cell (qps 0) of the same method")
    means = measured_services(alone)
    found = []
    for run in cell.runs:
        planned = _cell_of(run)
        requests = planned.requests()
        kind = kinds(planned, planned.build(), requests)
        if missing := set(kind.values()) - set(means):
            raise UserError(f"no single-stream hop of kind {', '.join(sorted(missing))}")
        services = {request.key: means[kind[request.key]] for request in requests}
        found.append(predicted(run, simulate(requests, planned.arrivals(), services)))
    return found


def _cell_of(run: Run) -> Cell:
    """The cell that a run was, planned again from its description."""
    info, served = run.info, run.info.serve
    if served is None or served.arrival == "azure" or served.layout == "recorded":
        raise UserError("not a cell that can be planned again")
    layout: Literal["T", "L0"] = "T" if served.layout == "T" else "L0"
    settings = GeneratorSettings(
        vocab=VOCAB,
        layout=layout,
        shared=served.shared_tokens,
        output=served.output_tokens,
        workflows=info.n,
        agents=served.agents,
        scale=served.scale,
    )
    profile = ServeProfile(
        model=info.model,
        arrival={served.arrival: (served.qps,)},
        rho=(served.rho,),
        selective_rho={served.rho: served.rho_method or served.rho},
        requests=info.n * served.agents,
        seed=info.seed,
        pool=0,
        time_scale=served.time_scale,
        gate="live" if served.rho_kind == "gate" else "controlled",
        methods=(ServeMethod(method=info.method, settings=info.settings),),
    )
    study = _study(profile, workload(settings), run.requests[0].layers)
    return make_cells(study, profile.methods)[0]


def _study(profile: ServeProfile, made: Workload, layers: int) -> Study:
    return Study(profile, made, layers, identity={}, capacity=None, out=Path())


def _planned(cell: Cell, method: Method, name: ScheduleName, seed: int) -> Cell:
    """The cell as the repeat ``seed``; ``even`` where a schedule is what holds its ratio."""
    workflows, chosen = cell.study.workload.workflows, cell.budget
    made, described = budgets.schedule(workflows, chosen, seed)
    if name == "even" and chosen.kind == "controlled" and chosen.rho is not None:
        made = even_schedule(workflows, chosen.rho)
        described = dict(made.settings)
    bound = budgets.cell_bound(workflows, chosen, made, method)
    return replace(cell, seed=seed, schedule=made, schedule_settings=described, bound=bound)


def _percentile(times: Sequence[float], q: float) -> float:
    return math.nan if too_few(q, len(times)) else stats.percentile(times, q)


def _together(bounds: Sequence[float | None]) -> float:
    """Bound of several repeats of one trace: dense work over the mean of what they execute."""
    known = [bound for bound in bounds if bound is not None]
    return len(known) / sum(1 / bound for bound in known) if known else math.nan
