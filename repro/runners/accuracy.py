"""`repro accuracy`: cells of methods, resumable after every sample."""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Plan
from kvcmas.engine.segments import Prompt, ids_sha256, pf
from kvcmas.engine.session import Engine
from kvcmas.engine.vision import VisualEncoder
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro import env
from repro.models import ResolvedModel, load, load_image_processor
from repro.models.loading import DType
from repro.profiles import CellSpec
from repro.runners.cells import Cell, depends_on_order, variant
from repro.runners.checkpoint import Checkpoint
from repro.runners.first_tokens import FirstTokens, compare
from repro.runners.memory import PeakMemory
from repro.runners.replay import warm_up
from repro.runners.rows import edge_records, measured
from repro.runners.trajectory import Runner, Step, Trajectory
from repro.runners.vision import Eyes, has_pictures
from results.records import (
    FirstToken,
    RunInfo,
    RunWriter,
    SampleRecord,
    TurnRecord,
    run_key,
)
from traces.schema import TraceWorkflow
from workloads.base import Dataset, Sample, Workload
from workloads.chat import ChatFormat

# The method whose first-token distributions the others are compared with.
BASELINE = "nonshared"
WARMUP_TOKENS = 64
# So often a cell's turn comes. Its pools are not in memory while others run.
BLOCKS = 8


@dataclass(frozen=True)
class Setup:
    """What all cells of one command share.

    Attributes:
        n: evaluated samples, at most.
        warm: samples that fill the pools first; they are not evaluated.
        calibration: samples on which budgets are found.
        held_out: split that ``warm`` and ``calibration`` samples come from; None is the rest of the
            evaluated one.
        workload_options: the workload's settings that are not its defaults.
    """

    workload: Workload
    dataset: Dataset
    n: int
    model: ResolvedModel
    dtype: DType
    device: str
    max_new_tokens: int
    final_tokens: int | None
    profile: str
    out: Path
    warm: int = 0
    calibration: int = 0
    held_out: Dataset | None = None
    workload_options: Mapping[str, Any] = field(default_factory=dict)

    def samples(self, seed: int) -> tuple[Sample, ...]:
        """The evaluated samples in the order of ``seed``."""
        return choose_samples(self.dataset, self.n, seed)

    @property
    def reserved(self) -> tuple[Sample, ...]:
        """Samples that are never evaluated: those that fill pools, then those to calibrate on.

        Raises:
            UserError: there are too few.
        """
        evaluated = {sample.request for sample in self.dataset.samples[: self.n]}
        source = self.held_out or self.dataset
        # Benchmarks repeat questions, also from one split to another.
        others = [sample for sample in source.samples if sample.request not in evaluated]
        wanted = self.warm + self.calibration
        if len(others) < wanted:
            raise UserError(
                f"{source.label} leaves {len(others)} samples beside the evaluated ones; "
                f"{self.warm} to fill pools and {self.calibration} to calibrate on are wanted"
            )
        return tuple(others[:wanted])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that changes any cell's result, method and order aside."""
        workflow, packages = self.workload.workflow, env.environment()["packages"]
        pictures = {}
        if has_pictures(self.dataset.samples):
            # What decodes and resizes them decides about pixels.
            pictures = {"pictures": {name: packages[name] for name in ("av", "pillow")}}
        return {
            **pictures,
            "bench": self.workload.name,
            "workload": dict(self.workload_options),
            "data": self.dataset.sha256,
            "model": self.model.revision,
            "dtype": self.dtype,
            "device": self.device,
            "max_new_tokens": self.max_new_tokens,
            "final_tokens": self.final_tokens,
            "warm": [sample.id for sample in self.reserved[: self.warm]],
            "workflow": workflow.name,
            "messages": [
                repr(self.workload.message(node, workflow.consumes(node)))
                for node in workflow.nodes
            ],
            "torch": packages["torch"],
            "transformers": packages["transformers"],
        }


def choose_samples(dataset: Dataset, n: int, seed: int) -> tuple[Sample, ...]:
    """The first ``n`` samples, in an order drawn from ``seed``.

    Online pools depend on the order of requests; run-to-run spread comes from nothing else.
    """
    chosen = list(dataset.samples[:n])
    random.Random(seed).shuffle(chosen)
    return tuple(chosen)


def block_ends(samples: int) -> list[int]:
    """Where cells hand over to the next one, so that they take turns.

    A machine that others use does not stay as fast: cells that ran one after the other would
    differ in latency for that alone.
    """
    size = -(-samples // BLOCKS)
    return [min(end, samples) for end in range(size, samples + size, size)] if samples else []


def order_sha256(samples: Sequence[Sample]) -> str:
    """Hash of the sample ids in running order."""
    return ids_sha256([ord(c) for s in samples for c in f"{s.id}\n"])


def make_cells(
    setup: Setup,
    specs: Sequence[CellSpec],
    seeds: Sequence[int],
    calibrate: Callable[[CellSpec], Mapping[str, Any]],
) -> list[Cell]:
    """Cells in running order, the baseline first so that the others can be compared with it.

    Methods that depend on the order of requests have a cell for each of ``seeds``, others for the
    first. ``calibrate`` returns the settings of a cell with a ``rho``.

    Raises:
        UserError: an unknown method or setting, or an illegal value.
    """
    orders = {seed: order_sha256(setup.samples(seed)) for seed in seeds}
    compared = any(spec.method == BASELINE for spec in specs)
    root = setup.out / f"{setup.workload.name}-{setup.model.name.replace('/', '--')}"
    cells = []
    for spec in sorted(specs, key=lambda spec: spec.method != BASELINE):
        chosen = spec.settings if spec.rho is None else calibrate(spec)
        method = make_method(spec.method, chosen)
        settings = json.loads(json.dumps(method.settings()))
        for seed in seeds if depends_on_order(method) else seeds[:1]:
            own = {
                "order": orders[seed],
                "method": spec.method,
                "settings": settings,
                "accept_all": spec.accept_all,
                "compared": compared,
            }
            key = run_key({**setup.identity, **own})
            cells.append(
                Cell(
                    method=spec.method,
                    settings=settings,
                    label=variant(spec),
                    target_rho=spec.rho,
                    accept_all=spec.accept_all,
                    seed=seed,
                    key=key,
                    directory=root / f"{spec.method.replace(':', '.')}-{key}",
                )
            )
    return cells


class Accuracy:
    """Runs cells on one loaded model."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        processor = None
        if has_pictures(setup.dataset.samples):
            processor = load_image_processor(setup.model)
        self.model, self.tokenizer = load(setup.model, dtype=setup.dtype, device=setup.device)
        self.adapter = TransformersAdapter(self.model)
        self.eyes = None if processor is None else Eyes(VisualEncoder(self.model, processor))
        eos = self.model.generation_config.eos_token_id
        self.chat = ChatFormat.from_tokenizer(
            self.tokenizer, [eos] if isinstance(eos, int) else eos or []
        )
        self._memory = PeakMemory(self.adapter.spec.device)
        self._environment = env.environment()

    def warm_up(self) -> None:
        """One discarded prefill and decode on tokens of no sample, which no cell then pays for."""
        engine = self.engine(BASELINE, {})
        prompt = Prompt((pf([1] * WARMUP_TOKENS),))
        buffer = engine.executor.run(prompt, Plan.make(prompt), new_tokens=2).buffer
        engine.executor.extend(buffer, [1])

    def run(
        self,
        cell: Cell,
        baseline: Cell | None,
        warm: Sequence[TraceWorkflow] = (),
        until: int | None = None,
    ) -> Iterator[int]:
        """Run what is missing of a cell; yields the number of complete samples, first now.

        ``warm`` are the recorded workflows that fill its pools, if there are to be any. Before
        sample ``until`` it stops as if it were interrupted.

        Raises:
            UserError: a directory that cannot be written, or a context beyond the model's.
            RecordError: a directory that belongs to another run.
        """
        samples = self.setup.samples(cell.seed)
        writer = RunWriter(cell.directory, self._info(cell))
        checkpoint = Checkpoint(cell.directory / "state")
        covered, state = checkpoint.load()
        done = min(covered, writer.completed())
        writer.truncate_to(done)
        engine = self.engine(cell.method, cell.settings)
        if state is not None:
            engine.load_state(state)
        elif warm and done < len(samples):
            warm_up(engine, tuple(warm), self.setup.workload.workflow.name)
            checkpoint.save(0, engine.state())
        first_tokens = FirstTokens(cell.directory if cell.method == BASELINE else None)
        reference = FirstTokens(baseline.directory if baseline else None)
        peaks: list[int] = []
        runner = self.runner(
            engine,
            before_turn=lambda node: self._memory.reset(),
            after_turn=lambda result: peaks.append(self._memory.bytes()),
        )
        yield done
        for index in range(done, len(samples) if until is None else min(until, len(samples))):
            peaks.clear()
            trajectory = runner.run(samples[index], accept=True if cell.accept_all else None)
            expected = reference.load(samples[index].id)
            turns = [
                _turn_record(cell, index, i, step, trajectory.sample, engine, peaks[i], expected)
                for i, step in enumerate(trajectory.steps)
            ]
            first_tokens.save(samples[index].id, [step.result for step in trajectory.steps])
            writer.append_sample(turns, _sample_record(cell, index, trajectory, turns))
            checkpoint.save(index + 1, engine.state())
            yield index + 1

    @property
    def reference_prefix(self) -> tuple[int, ...]:
        """BOS, else an end-of-turn token: an attention sink for context-free references."""
        bos = self.tokenizer.bos_token_id
        return (bos,) if isinstance(bos, int) else tuple(sorted(self.chat.stop_ids)[:1])

    def engine(self, method: str, settings: Mapping[str, Any]) -> Engine:
        """A fresh engine of a method on the loaded model."""
        made = make_method(method, settings)
        return Engine(self.adapter, made, reference_prefix=self.reference_prefix)

    def runner(self, engine: Engine, **hooks: Any) -> Runner:
        """A runner of the workload with the setup's limits; ``hooks`` are the runner's."""
        setup = self.setup
        if self.eyes is not None:
            hooks["look"] = self.eyes
        return Runner(
            engine, setup.workload, self.chat, setup.max_new_tokens, setup.final_tokens, **hooks
        )

    def _info(self, cell: Cell) -> RunInfo:
        setup = self.setup
        samples = setup.samples(cell.seed)
        return RunInfo(
            run_key=cell.key,
            created=datetime.now(UTC),
            kind="accuracy",
            bench=setup.workload.name,
            data=setup.dataset.source,
            data_sha256=setup.dataset.sha256,
            method=cell.method,
            label=cell.label,
            settings=dict(cell.settings),
            model=setup.model.name,
            model_revision=setup.model.revision,
            dtype=str(self.adapter.spec.dtype).removeprefix("torch."),
            engine="transformers",
            attention="sdpa",
            device=self.adapter.spec.device.type,
            hardware=env.hardware(),
            seed=cell.seed,
            sample_order_sha256=order_sha256(samples),
            pool_state="warm" if setup.warm else "cold",
            n=len(samples),
            max_new_tokens=setup.max_new_tokens,
            final_tokens=setup.final_tokens,
            workflow=setup.workload.workflow.name,
            agents=setup.workload.agents,
            workload=dict(setup.workload_options),
            target_rho=cell.target_rho,
            missing=setup.dataset.missing,
            image_processor=None if self.eyes is None else self.eyes.encoder.processor,
            profile=setup.profile,
            environment=self._environment,
            command=shlex.join(["repro", *sys.argv[1:]]),
        )


def _turn_record(
    cell: Cell,
    sample_index: int,
    turn_index: int,
    step: Step,
    sample: Sample,
    engine: Engine,
    peak: int,
    expected: Mapping[str, tuple[str, torch.Tensor]],
) -> TurnRecord:
    result = step.result
    sampled = len(result.output) + (result.finish == "stop")
    around = {"observe": step.observe_s} | ({"look": step.look_s} if step.look_s else {})
    return TurnRecord(
        run_key=cell.key,
        sample_id=sample.id,
        sample_index=sample_index,
        node=result.node,
        turn_index=turn_index,
        **measured(result, engine),
        output_tokens=sampled,
        output_ids_sha256=ids_sha256(result.output),
        finish="stop" if result.finish == "stop" else "length",
        ttft_s=result.times.ttft if sampled else None,
        e2e_s=result.times.e2e + sum(around.values()),
        times_s=asdict(result.times) | around,
        edges=tuple(edge_records(result)),
        first_token=compare(result, expected) or FirstToken(),
        peak_memory_bytes=peak,
    )


def _sample_record(
    cell: Cell, index: int, trajectory: Trajectory, turns: Sequence[TurnRecord]
) -> SampleRecord:
    ttfts = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
    return SampleRecord(
        run_key=cell.key,
        sample_id=trajectory.sample.id,
        sample_index=index,
        correct=trajectory.score.correct,
        extracted=trajectory.score.extracted,
        expected=trajectory.score.expected,
        failure=trajectory.score.failure,
        outputs={step.result.node: step.text for step in trajectory.steps},
        e2e_s=sum(turn.e2e_s for turn in turns),
        ttft_mean_s=sum(ttfts) / len(ttfts) if ttfts else None,
        notes={
            "observations": {
                step.result.node: step.observation for step in trajectory.steps if step.observation
            },
            **trajectory.score.notes,
        },
    )
