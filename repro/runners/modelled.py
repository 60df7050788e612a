"""Simulated cells as run records: the rows of served ones, in runs of kind ``model``."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvcmas.engine.segments import ids_sha256
from repro import env
from repro.runners.hop_costs import Gpu, HopCosts, Utilisation
from repro.runners.queue_model import Service, reused_segments
from repro.runners.serving.capacity import LLAMA_8B, prefill_flops
from repro.runners.serving.cells import Cell
from repro.runners.serving.loop import Answered
from repro.runners.serving.pools import learns
from repro.runners.serving.rows import write_cell
from results.records import EntryCounts, Run, RunInfo, RunWriter, ServeInfo, run_key
from traces.schema import TurnKey

ENGINE = "queue model"


def predicted(run: Run, answered: Sequence[Answered]) -> Run:
    """A served run with the times that the model gives its requests.

    ``answered`` are all requests of the run's trace, in its order; those that were lost are left
    out. Everything else is the served run's, so that the two are compared cell by cell.
    """
    served = run.info.serve
    if served is None:
        raise ValueError("not a served run")
    key = run_key({"kind": "model", "of": run.info.run_key})
    info = run.info.model_copy(
        update={
            "kind": "model",
            "run_key": key,
            "serve": served.model_copy(update={"mode": "modelled"}),
            "command": _command(),
        }
    )
    rows = []
    for row in run.requests:
        one = answered[row.sample_index * served.agents + row.turn_index]
        rows.append(row.model_copy(update={"run_key": key, "times_s": {}, **_times(one)}))
    samples = tuple(sample.model_copy(update={"run_key": key}) for sample in run.samples)
    return Run(info, (), samples, requests=tuple(rows))


def store(folder: Path, run: Run) -> None:
    """Write a predicted run; one that is there is replaced.

    Raises:
        RecordError: the directory cannot be written.
    """
    writer = RunWriter(folder / f"{run.info.method.replace(':', '.')}-{run.info.run_key}", run.info)
    writer.truncate_to(0)
    for sample in run.samples:
        rows = [row for row in run.requests if row.sample_index == sample.sample_index]
        writer.append_sample(rows, sample)


def store_simulated(
    folder: Path,
    cell: Cell,
    answered: Sequence[Answered],
    services: Mapping[TurnKey, Service],
    costs: HopCosts,
    gpu: Gpu,
    used: Utilisation,
    needed_gb: float,
) -> None:
    """Write a cell that was simulated on a GPU; without ``answered`` it does not fit the memory.

    Raises:
        RecordError: the directory cannot be written.
    """
    info = _info(cell, gpu, used, needed_gb, out_of_memory=not answered)
    writer = RunWriter(folder / f"{cell.method.replace(':', '.')}-{info.run_key}", info)
    writer.truncate_to(0)
    if answered:
        method, requests = cell.build(), [one.served.request for one in answered]
        filled = reused_segments(cell, method, requests)
        results = []
        for one in answered:
            request = one.served.request
            account = costs.account(method, request, filled[request.key])
            own = account.row_layers / account.layers
            fields = {
                "prompt_sha256": request.prompt.sha256,
                "prompt_tokens": len(request.prompt),
                "layers": account.layers,
                "entries": EntryCounts(**asdict(account.prompt)),
                "touched_rows": account.touched_rows,
                "executed_flops": account.flops,
                "reference_tokens": round(services[request.key].rows - own),
                **dict.fromkeys(
                    ("source_bytes", "pool_bytes", "pool_entries", "reference_bytes"), 0
                ),
                "edges": (),
                "times_s": {},
            }
            results.append(replace(one, served=replace(one.served, measured=fields)))
        write_cell(writer, info.run_key, cell.study.workload.workflows, results)


def _info(
    cell: Cell, gpu: Gpu, used: Utilisation, needed_gb: float, *, out_of_memory: bool
) -> RunInfo:
    workload = cell.study.workload
    hashes = [turn.prompt.sha256 for flow in workload.workflows for turn in flow.turns]
    data = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    flops = sum(prefill_flops(LLAMA_8B, n) for n in workload.prompts) / len(workload.prompts)
    capacity = cell.settings.get("capacity")
    key = {
        "kind": "model",
        "data": data,
        "method": cell.method,
        "settings": cell.settings,
        "budget": [cell.budget.kind, cell.budget.rho],
        "schedule": cell.schedule_settings,
        "load": [cell.law, cell.qps, cell.seed],
        "gpu": [gpu.name, used.compute, used.bandwidth],
    }
    names = "\n".join(flow.request for flow in workload.workflows)
    return RunInfo(
        run_key=run_key(key),
        created=datetime.now(UTC),
        kind="model",
        bench=workload.name,
        data="procedural",
        data_sha256=data,
        method=cell.method,
        label=cell.label,
        settings=cell.plain_settings,
        model="llama-3.1-8b",
        model_revision=None,
        dtype="bfloat16",
        engine=ENGINE,
        attention="roofline",
        device="none",
        hardware=f"{gpu.name}, modelled",
        seed=cell.seed,
        sample_order_sha256=ids_sha256(list(names.encode())),
        n=len(workload.workflows),
        max_new_tokens=1,
        workflow=workload.topology,
        profile="paper",
        environment=env.environment(),
        command=_command(),
        serve=ServeInfo(
            mode="modelled",
            layout=workload.layout,
            shared_tokens=workload.shared,
            output_tokens=workload.output,
            agents=workload.agents,
            scale=workload.scale,
            arrival=cell.law,
            qps=cell.qps,
            time_scale=1.0,
            capacity=gpu.bf16_tflops * 1e12 * used.compute / flops,
            clock="virtual",
            decode=False,
            rho=cell.rho,
            rho_kind=cell.budget.kind,
            rho_method=cell.budget.rho,
            schedule=dict(cell.schedule_settings),
            work_bound=cell.bound,
            pool=f"{cell.method}-{capacity}-full" if learns(cell.build()) else "fresh",
            pool_entries=0,
            warm_up_requests=0,
            memory_needed_bytes=round(needed_gb * 1e9),
            memory_limit_bytes=round(gpu.memory_gb * 1e9),
            out_of_memory=out_of_memory,
        ),
    )


def _times(one: Answered) -> dict[str, Any]:
    """Times of a record, in seconds."""
    served = one.served
    return {
        "arrival_s": one.arrival,
        "released_s": one.released,
        "started_s": served.started,
        "ttft_s": served.first_token - one.arrival,
        "e2e_s": served.finished - one.arrival,
        "finished_s": served.finished,
    }


def _command() -> str:
    return shlex.join(["repro", *sys.argv[1:]])
