"""Running cells: pools, warm-up, memory check, the open loop, records.

A finished cell is kept. One that was interrupted has no rows yet and is run again from the start:
half a queue cannot be resumed.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvcmas.engine.contract import State
from kvcmas.engine.segments import ids_sha256
from repro import env
from repro.models import ResolvedModel
from repro.runners.serving.backend import Backend
from repro.runners.serving.cells import Cell
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import Request
from repro.runners.serving.loop import serve
from repro.runners.serving.memory import needed_bytes, pool_bytes
from repro.runners.serving.pools import fill, has_pool, load_pool, save_pool
from repro.runners.serving.rows import write_cell
from results.records import Run, RunInfo, RunWriter, ServeInfo, read_run
from traces.arrival import arrivals


@dataclass(frozen=True)
class Setting:
    """What all cells of one command share.

    Attributes:
        memory_limit: bytes; a cell that needs more is not run.
        profile: name of the profile, for the record.
    """

    model: ResolvedModel
    backend: Backend
    memory_limit: int
    profile: str


class Runner:
    """Runs cells one by one."""

    def __init__(
        self, setting: Setting, on_step: Callable[[str], None] = lambda step: None
    ) -> None:
        self._setting = setting
        self._on_step = on_step
        self._warmed: dict[str, int] = {}
        self._pool: tuple[str, State | None] = ("fresh", None)
        self._environment = env.environment()

    def finished(self, cell: Cell) -> Run | None:
        """The records of a cell that needs no running any more.

        Raises:
            RecordError: its directory is damaged.
        """
        if not (cell.directory / "run.json").exists():
            return None
        run = read_run(cell.directory)
        done = run.info.serve is not None and run.info.serve.out_of_memory
        return run if done or len(run.samples) == run.info.n else None

    def needed_bytes(self, cell: Cell) -> int:
        """What the cell is estimated to need."""
        sketch, longest = self._setting.backend.sketch, cell.study.workload.workflows[0]
        return needed_bytes(cell.build(), longest, sketch.spec, sketch.weight_bytes)

    def fits(self, cell: Cell) -> bool:
        """Whether that is within the limit."""
        return self.needed_bytes(cell) <= self._setting.memory_limit

    def fill_pools(self, cells: Sequence[Cell]) -> None:
        """Fill the pools that these cells need and that are not there yet, several at a time.

        Raises:
            UserError: a pool cannot be written.
        """
        missing: dict[str, Cell] = {}
        for cell in cells:
            if cell.pool == "fresh" or not self.fits(cell):
                continue
            if not has_pool(_pool_directory(cell), len(cell.study.workload.pool)):
                missing.setdefault(cell.pool, cell)
        for group in self._groups(list(missing.values())):
            workload = group[0].study.workload
            names = ", ".join(cell.name for cell in group)
            self._on_step(f"filling pools from {len(workload.pool)} workflows: {names}")
            states = fill(
                self._setting.backend.adapter,
                {cell.pool: cell.build() for cell in group},
                workload.pool,
                workload.topology,
                self._setting.backend.sketch.reference_prefix,
            )
            for cell in group:
                save_pool(_pool_directory(cell), len(workload.pool), states[cell.pool])

    def run(self, cell: Cell, on_end: Callable[[int], None] = lambda ended: None) -> Run:
        """Run a cell and return its records.

        Args:
            on_end: told how many requests have ended.

        Raises:
            UserError: a context beyond the model's, or a directory that cannot be written.
        """
        if not self.fits(cell):
            RunWriter(cell.directory, self._info(cell, 0, out_of_memory=True))
            return read_run(cell.directory)
        pool = self._load_pool(cell)
        self._warm_up(cell, pool)
        clock = Clock(cell.study.profile.clock)
        with clock.paused():  # nothing has arrived yet
            requests, due = cell.requests(), cell.arrivals()
            engine = self._setting.backend.engine(
                cell.build(),
                clock,
                topology=cell.study.workload.topology,
                pool=pool,
                decode=cell.study.profile.decode,
            )
        try:
            self._on_step(f"{cell.name}: {cell.law}, {cell.qps:g} QPS")
            results = serve(
                engine,
                requests,
                due,
                clock,
                limit=cell.study.profile.cell_limit_s,
                on_end=on_end,
            )
        finally:
            engine.close()
        writer = RunWriter(cell.directory, self._info(cell, len(pool.entries) if pool else 0))
        writer.truncate_to(0)
        write_cell(writer, cell.key, cell.study.workload.workflows, results)
        return read_run(cell.directory)

    def _groups(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Cells whose full pools fit into memory together, and whose pools come from one trace."""
        backend, room = self._setting.backend, self._setting.memory_limit
        groups: list[list[Cell]] = []
        used = 0
        for cell in cells:
            workload = cell.study.workload
            pool = pool_bytes(cell.build(), workload.workflows[0], backend.sketch.spec)
            before = groups[-1][0].study.workload if groups else None
            same = before is not None and before.pool_sha256 == workload.pool_sha256
            if not same or used + pool > room / 2:
                groups.append([])
                used = 0
            groups[-1].append(cell)
            used += pool
        return groups

    def _load_pool(self, cell: Cell) -> State | None:
        """The cell's pool; the last one is kept, because cells of one method follow each other."""
        if self._pool[0] != cell.pool:
            self._pool = ("fresh", None)  # never hold two
            if cell.pool != "fresh":
                self.fill_pools([cell])
                self._pool = (cell.pool, load_pool(_pool_directory(cell)))
        return self._pool[1]

    def _warm_up(self, cell: Cell, pool: State | None) -> None:
        """One discarded workflow on an engine of its own: dense first, reusing, refused at last."""
        if cell.shape in self._warmed:
            return
        workload = cell.study.workload
        flow, clock = workload.warm_up, Clock("virtual")
        self._on_step(f"{cell.name}: warming up")
        engine = self._setting.backend.engine(
            cell.build(), clock, topology=workload.topology, pool=pool
        )
        requests = []
        for position, turn in enumerate(flow.turns):
            prompt, last = turn.prompt, position == len(flow.turns) - 1
            force = dict.fromkeys(prompt.shared(), not last)
            requests.append(Request(flow, turn, position, prompt, force, ()))
        serve(engine, requests, arrivals((flow,), "even", 0.0), clock)
        engine.close()
        self._warmed[cell.shape] = len(requests)

    def _info(self, cell: Cell, pool_entries: int, *, out_of_memory: bool = False) -> RunInfo:
        study, model, backend = cell.study, self._setting.model, self._setting.backend
        workload, profile, spec = study.workload, study.profile, backend.sketch.spec
        if study.capacity is None:
            raise ValueError("a cell is run at a rate, which needs NonShared's capacity")
        names = "\n".join(workflow.request for workflow in workload.workflows)
        return RunInfo(
            run_key=cell.key,
            created=datetime.now(UTC),
            kind=cell.kind,
            bench=workload.name,
            data="local" if workload.layout == "recorded" else "procedural",
            data_sha256=workload.sha256,
            method=cell.method,
            label=cell.label,
            settings=cell.plain_settings,
            model=model.name,
            model_revision=model.revision,
            dtype=str(spec.dtype).removeprefix("torch."),
            engine=backend.engine_name,
            attention=backend.attention,
            device=backend.device,
            hardware=env.hardware(),
            seed=cell.seed,
            sample_order_sha256=ids_sha256(list(names.encode())),
            pool_state="warm" if pool_entries else "cold",
            n=len(workload.workflows),
            max_new_tokens=max(1, workload.output) if profile.decode else 1,
            workflow=workload.topology,
            profile=self._setting.profile,
            environment=self._environment,
            command=shlex.join(["repro", *sys.argv[1:]]),
            serve=ServeInfo(
                mode="real" if cell.emulated is None else "emulated",
                emulation={} if cell.emulated is None else cell.emulated.charges(),
                layout=workload.layout,
                shared_tokens=workload.shared,
                output_tokens=workload.output,
                agents=workload.agents,
                scale=workload.scale,
                arrival=cell.law,
                qps=cell.qps,
                time_scale=study.time_scale,
                capacity=study.capacity.requests_per_s,
                clock=profile.clock,
                decode=profile.decode,
                slo_ttft_s=profile.slo_ttft_s,
                slo_inter_token_s=profile.slo_inter_token_s,
                rho=cell.rho,
                rho_kind=cell.budget.kind,
                rho_method=cell.budget.rho,
                schedule=dict(cell.schedule_settings),
                work_bound=cell.bound,
                pool=cell.pool,
                pool_entries=pool_entries,
                warm_up_requests=self._warmed.get(cell.shape, 0),
                memory_needed_bytes=self.needed_bytes(cell),
                memory_limit_bytes=self._setting.memory_limit,
                out_of_memory=out_of_memory,
            ),
        )


def _pool_directory(cell: Cell) -> Path:
    return cell.study.out / "pools" / cell.pool
