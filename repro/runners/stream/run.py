"""Running the cells of a single stream: pools, warm-up, one workflow after another, records.

Every workflow starts from full pools: what one workflow's dense turns insert would push out anchors
that hold more edges, and later ones would be corrected from fewer. So an interrupted cell goes on
as if nothing had happened.
"""

from __future__ import annotations

import gc
import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import State
from kvcmas.engine.segments import ids_sha256
from kvcmas.engine.session import Engine
from repro import env
from repro.runners.allocations import Allocations
from repro.runners.memory import PeakMemory
from repro.runners.serving.pools import fill, has_pool, load_pool, save_pool
from repro.runners.stream.cells import Cell, Stage
from repro.runners.stream.machine import measure_rates
from repro.runners.stream.model import stretch
from repro.runners.stream.pools import anchors_of, filled, finished
from repro.runners.stream.rows import Place, end_of_workflow, turn_row
from results.records import Run, RunInfo, RunWriter, read_run
from results.stream_schema import Rates, StreamInfo


@dataclass
class Runner:
    """Runs the cells of stages, holding one model at a time.

    Attributes:
        memory_limit: bytes; a cell that needs more is not run.
        profile: name of the profile, for the record.
    """

    device: str
    memory_limit: int
    profile: str
    on_step: Callable[[str], None] = lambda step: None
    _stage: Stage | None = None
    _adapter: TransformersAdapter | None = None
    _rates: Rates | None = None
    _warmed: dict[str, _Warmed] = field(default_factory=dict)
    _environment: dict[str, Any] = field(default_factory=env.environment)

    def finished(self, cell: Cell) -> Run | None:
        """The records of a cell that needs no running any more.

        Raises:
            RecordError: its directory is damaged.
        """
        if not (cell.directory / "run.json").exists():
            return None
        run = read_run(cell.directory)
        info = run.info.stream
        if info is None or not info.out_of_memory:
            return run if len(run.samples) == run.info.n else None
        # Under a higher limit it may run; but not where the device itself had no more.
        tried = info.memory_needed_bytes <= info.memory_limit_bytes
        return run if tried or not self.fits(cell) else None

    def fits(self, cell: Cell) -> bool:
        """Whether what the cell needs is within the limit."""
        return cell.needed_bytes <= self.memory_limit

    def teach(self, cells: Sequence[Cell]) -> None:
        """Let the methods of one stage learn from one workflow, all at once, where they have not.

        Raises:
            UserError: a pool cannot be written.
        """
        missing = {
            cell.pool: cell
            for cell in cells
            if cell.pool is not None and self.fits(cell) and not has_pool(cell.pool, 1)
        }
        if not missing:
            return
        stage = next(iter(missing.values())).stage
        self.on_step(f"{stage.name}: one dense workflow for {len(missing)} pools")
        try:
            states = fill(
                self._open(stage),
                {str(path): cell.build() for path, cell in missing.items()},
                stage.workload.pool,
                stage.workload.topology,
                stage.model.sketch.reference_prefix,
            )
        except torch.OutOfMemoryError:
            if len(missing) == 1:
                raise
            return  # each of them learns alone, when it is run
        dtype = stage.model.sketch.spec.dtype
        for path, cell in missing.items():
            save_pool(path, 1, finished(states[str(path)], cell.build(), dtype))

    def run(self, cell: Cell, *, anew: bool = False) -> Iterator[int]:
        """Run what is missing of a cell; yields the number of workflows done after each.

        Too little memory is a result: calculated beforehand, or found by the device.

        Args:
            anew: run again what is there.

        Raises:
            UserError: a directory that cannot be written.
        """
        known = self._known(cell)
        if anew or (known is not None and known.out_of_memory):
            shutil.rmtree(cell.directory, ignore_errors=True)
        if self.fits(cell):
            try:
                yield from self._measure(cell)
                return
            except torch.OutOfMemoryError:
                shutil.rmtree(cell.directory, ignore_errors=True)
        self._collect()
        RunWriter(cell.directory, self._info(cell, None, out_of_memory=True))

    def _known(self, cell: Cell) -> StreamInfo | None:
        """What an earlier run of the cell left."""
        there = (cell.directory / "run.json").exists()
        return read_run(cell.directory).info.stream if there else None

    def _measure(self, cell: Cell) -> Iterator[int]:
        adapter = self._open(cell.stage)
        pool = self._pool(cell, adapter)
        warmed = self._warm_up(cell, adapter, pool)
        entries = 0 if pool is None else len(pool.entries)
        writer = RunWriter(cell.directory, self._info(cell, warmed, pool_entries=entries))
        engine = _engine(cell, adapter, None)
        self._collect()
        yield from range(1, writer.completed() + 1)
        for index in range(writer.completed(), len(cell.stage.workload.workflows)):
            if pool is not None:
                engine.load_state(pool)
            self._workflow(cell, engine, writer, index, warmed.transient)
            yield index + 1

    def close(self) -> None:
        """Give the model back."""
        self._stage = self._adapter = self._rates = None
        self._warmed.clear()
        self._collect()

    def _collect(self) -> None:
        """Nothing of an earlier cell shall count for the next one."""
        gc.collect()
        if self.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _open(self, stage: Stage) -> TransformersAdapter:
        """The stage's model; the last one is kept."""
        if self._adapter is None or self._stage is not stage:
            known = self._stage
            if self._adapter is None or known is None or known.model is not stage.model:
                self.close()
                self.on_step(f"opening {stage.model.name}")
                self._adapter = stage.model.open()
            stretch(self._adapter, stage.workload.positions)
            self._stage = stage
            self._rates = measure_rates(self._adapter.spec, len(stage.longest.turns[-1].prompt))
        return self._adapter

    def _pool(self, cell: Cell, adapter: TransformersAdapter) -> State | None:
        if cell.pool is None:
            return None
        self.teach([cell])
        state = load_pool(cell.pool)
        if state is None:
            raise ValueError(f"{cell.pool} holds no pool")
        device = adapter.spec.device
        entries = {
            name: {key: t.to(device) for key, t in entry.items()}
            for name, entry in state.entries.items()
        }
        return filled(State(state.meta, entries), cell.build())

    def _warm_up(self, cell: Cell, adapter: TransformersAdapter, pool: State | None) -> _Warmed:
        """One discarded workflow per shape: everything reused, its last turn refused."""
        method = cell.build()
        settings = json.dumps(dict(cell.settings)) if method.learns else ""
        shape = f"{cell.stage.model.name} {cell.stage.name} {cell.method} {settings}"
        if shape not in self._warmed:
            self.on_step(f"{cell.name}: warming up on {cell.stage.name}")
            self._warmed[shape] = warm_up(_engine(cell, adapter, pool), cell.stage)
        return self._warmed[shape]

    def _workflow(
        self, cell: Cell, engine: Engine, writer: RunWriter, index: int, transient: int | None
    ) -> None:
        workflow = cell.stage.workload.workflows[index]
        session = engine.session(workflow.workflow(cell.stage.workload.topology), workflow.request)
        peak = PeakMemory(engine.executor.model.spec.device)
        weights = cell.stage.model.sketch.weight_bytes
        rows = []
        for position, turn in enumerate(workflow.turns):
            prompt, force = turn.prompt, cell.force(workflow, position)
            peak.reset()
            result = session.run(
                turn.node,
                prompt,
                max_new_tokens=len(turn.output),
                output=turn.output,
                force=force,
                keep_buffer=True,
                stepwise=True,
            )
            peaks = peak.all()
            place = Place(cell.key, index, workflow.request, position)
            rows.append(
                turn_row(place, result, engine, weights=weights, transient=transient, peak=peaks)
            )
            del result  # or two buffers were held while the next turn runs
        writer.append_sample(rows, end_of_workflow(place, rows))

    def _info(
        self,
        cell: Cell,
        warmed: _Warmed | None,
        *,
        pool_entries: int = 0,
        out_of_memory: bool = False,
    ) -> RunInfo:
        stage, sketch = cell.stage, cell.stage.model.sketch
        workload, spec = stage.workload, sketch.spec
        names = "\n".join(workflow.request for workflow in workload.workflows)
        return RunInfo(
            run_key=cell.key,
            created=datetime.now(UTC),
            kind="stream",
            bench=stage.name,
            data="procedural",
            data_sha256=workload.sha256,
            method=cell.method,
            label=cell.label,
            settings=json.loads(json.dumps(dict(cell.settings))),
            model=stage.model.name,
            model_revision=stage.model.revision,
            dtype=str(spec.dtype).removeprefix("torch."),
            engine="transformers",
            attention="sdpa",
            device=self.device,
            hardware=env.hardware(),
            seed=stage.seed,
            sample_order_sha256=ids_sha256(list(names.encode())),
            pool_state="warm" if pool_entries else "cold",
            n=len(workload.workflows),
            max_new_tokens=max(1, len(stage.longest.turns[0].output)),
            workflow=workload.topology,
            profile=self.profile,
            environment=self._environment,
            command=shlex.join(["repro", *sys.argv[1:]]),
            stream=StreamInfo(
                layout=stage.layout,
                shared_tokens=workload.shared,
                output_tokens=workload.output,
                agents=stage.agents,
                rounds=stage.rounds,
                scale=workload.scale,
                load="dummy" if stage.model.dummy else "weights",
                positions=workload.positions,
                model_positions=sketch.spec.max_positions,
                rho_kind=cell.budget.kind,
                rho=cell.budget.rho,
                schedule=dict(cell.schedule_settings),
                work_bound=cell.bound,
                pool_entries=pool_entries,
                pool_copies=anchors_of(cell.build()) if pool_entries else 0,
                warm_up_requests=0 if warmed is None else warmed.requests,
                rates=None if out_of_memory else self._rates,
                memory_needed_bytes=cell.needed_bytes,
                memory_limit_bytes=self.memory_limit,
                out_of_memory=out_of_memory,
            ),
        )


@dataclass(frozen=True)
class _Warmed:
    """A discarded workflow: its agent requests, and what learning from its last turn held."""

    requests: int
    transient: int | None


def warm_up(engine: Engine, stage: Stage) -> _Warmed:
    """Run a workflow that is not measured: everything reused, the last turn refused.

    What that turn's learning allocates is counted, because nothing here is timed.
    """
    workflow = stage.workload.warm_up
    session = engine.session(workflow.workflow(stage.workload.topology), workflow.request)
    for turn in workflow.turns[:-1]:
        session.run(
            turn.node,
            turn.prompt,
            max_new_tokens=len(turn.output),
            output=turn.output,
            force=dict.fromkeys(turn.prompt.shared(), True),
            stepwise=True,
        )
    last = workflow.turns[-1]
    opened = session.open(last.node, last.prompt, dict.fromkeys(last.prompt.shared(), False))
    wants = engine.method.wants
    buffer = engine.executor.run(
        last.prompt,
        opened.plan,
        hidden_layers=wants.hidden_layers,
        received=wants.received == "all",
    ).buffer
    if not engine.method.learns:
        return _Warmed(len(workflow.turns), None)
    known = set(engine.state().entries)
    with torch.inference_mode(), Allocations() as made:
        session.learn(opened, buffer)
    learned = State(entries={k: e for k, e in engine.state().entries.items() if k not in known})
    return _Warmed(len(workflow.turns), max(0, made.peak - learned.nbytes))


def _engine(cell: Cell, adapter: TransformersAdapter, pool: State | None) -> Engine:
    engine = Engine(
        adapter, cell.build(), reference_prefix=cell.stage.model.sketch.reference_prefix
    )
    if pool is not None:
        engine.load_state(pool)
    return engine
