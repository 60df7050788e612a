"""`repro accuracy`: one cell per method, resumable after every sample."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Plan
from kvcmas.engine.segments import Prompt, ids_sha256, pf
from kvcmas.engine.session import Engine
from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method, setting_names, suggestion
from repro import env
from repro.models import ResolvedModel, load
from repro.models.loading import DType
from repro.runners.checkpoint import Checkpoint
from repro.runners.first_tokens import FirstTokens, compare
from repro.runners.memory import PeakMemory
from repro.runners.rows import edge_records, measured
from repro.runners.trajectory import Runner, Step, Trajectory
from results.records import (
    FirstToken,
    RunInfo,
    RunWriter,
    SampleRecord,
    TurnRecord,
    run_key,
)
from workloads.base import Dataset, Sample, Workload
from workloads.chat import ChatFormat

# The method whose first-token distributions the others are compared with.
BASELINE = "nonshared"
WARMUP_TOKENS = 64


@dataclass(frozen=True)
class Cell:
    """One method on one bench: what it is, and the key of everything that changes its result."""

    method: str
    settings: Mapping[str, Any]
    label: str
    key: str
    directory: Path


@dataclass(frozen=True)
class Setup:
    """What all cells of one command share.

    Attributes:
        command: the command line as typed, for the record.
        samples: the evaluated samples in the order they are run.
    """

    workload: Workload
    dataset: Dataset
    samples: tuple[Sample, ...]
    model: ResolvedModel
    dtype: DType
    device: str
    seed: int
    max_new_tokens: int
    profile: str
    out: Path
    workload_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def order_sha256(self) -> str:
        """Hash of the sample ids in running order."""
        return ids_sha256([ord(c) for s in self.samples for c in f"{s.id}\n"])

    def identity(self) -> dict[str, Any]:
        """Everything that changes any cell's result, method aside."""
        return {
            "bench": self.workload.name,
            "workload": dict(self.workload_options),
            "data": self.dataset.sha256,
            "order": self.order_sha256,
            "model": self.model.revision,
            "dtype": self.dtype,
            "device": self.device,
            "max_new_tokens": self.max_new_tokens,
            "workflow": self.workload.workflow.name,
            "messages": [
                repr(self.workload.message(node, self.workload.workflow.consumes(node)))
                for node in self.workload.workflow.nodes
            ],
            "torch": env.environment()["packages"]["torch"],
            "transformers": env.environment()["packages"]["transformers"],
        }


def choose_samples(dataset: Dataset, n: int, seed: int) -> tuple[Sample, ...]:
    """The first ``n`` samples, in an order drawn from ``seed``.

    Online pools depend on the order of requests; run-to-run spread comes from nothing else.
    """
    chosen = list(dataset.samples[:n])
    random.Random(seed).shuffle(chosen)
    return tuple(chosen)


def make_cells(setup: Setup, methods: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    """Cells in running order, the baseline first so that the others can be compared with it.

    Raises:
        UserError: an unknown method or setting, or an illegal value.
    """
    identity, cells = setup.identity(), []
    names = sorted(methods, key=lambda name: name != BASELINE)
    compared = BASELINE in methods
    for name in names:
        method = make_method(name, methods[name])
        settings = method.settings()
        defaults = make_method(name).settings()
        changed = {k: v for k, v in settings.items() if v != defaults[k]}
        key = run_key({**identity, "method": name, "settings": settings, "compared": compared})
        label = " ".join(f"{k}={v}" for k, v in changed.items())
        root = setup.out / f"{setup.workload.name}-{setup.model.name.replace('/', '--')}"
        cells.append(Cell(name, settings, label, key, root / f"{name.replace(':', '.')}-{key}"))
    return cells


class Accuracy:
    """Runs cells on one loaded model."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model, self.tokenizer = load(setup.model, dtype=setup.dtype, device=setup.device)
        self.adapter = TransformersAdapter(self.model)
        eos = self.model.generation_config.eos_token_id
        self.chat = ChatFormat.from_tokenizer(
            self.tokenizer, [eos] if isinstance(eos, int) else eos or []
        )
        self._memory = PeakMemory(self.adapter.spec.device)
        self._environment = env.environment()

    def warm_up(self) -> None:
        """One discarded prefill and decode on tokens of no sample, which no cell then pays for."""
        engine = self._engine(BASELINE, {})
        prompt = Prompt((pf([1] * WARMUP_TOKENS),))
        buffer = engine.executor.run(prompt, Plan.make(prompt), new_tokens=2).buffer
        engine.executor.extend(buffer, [1])

    def run(self, cell: Cell, baseline: Cell | None) -> Iterator[int]:
        """Run what is missing of a cell; yields the number of complete samples, first now.

        Raises:
            UserError: a directory that cannot be written, or a context beyond the model's.
            RecordError: a directory that belongs to another run.
        """
        writer = RunWriter(cell.directory, self._info(cell))
        checkpoint = Checkpoint(cell.directory / "state")
        covered, state = checkpoint.load()
        done = min(covered, writer.completed())
        writer.truncate_to(done)
        engine = self._engine(cell.method, cell.settings)
        if done and state is not None:
            engine.load_state(state)
        first_tokens = FirstTokens(cell.directory if cell.method == BASELINE else None)
        reference = FirstTokens(baseline.directory if baseline else None)
        peaks: list[int] = []
        runner = Runner(
            engine,
            self.setup.workload,
            self.chat,
            self.setup.max_new_tokens,
            before_turn=lambda node: self._memory.reset(),
            after_turn=lambda result: peaks.append(self._memory.bytes()),
        )
        yield done
        for index in range(done, len(self.setup.samples)):
            peaks.clear()
            trajectory = runner.run(self.setup.samples[index])
            expected = reference.load(index)
            turns = [
                _turn_record(cell, index, i, step, trajectory.sample, engine, peaks[i], expected)
                for i, step in enumerate(trajectory.steps)
            ]
            first_tokens.save(index, [step.result for step in trajectory.steps])
            writer.append_sample(turns, _sample_record(cell, index, trajectory, turns))
            checkpoint.save(index + 1, engine.state())
            yield index + 1

    def _engine(self, method: str, settings: Mapping[str, Any]) -> Engine:
        eos = self.tokenizer.bos_token_id
        prefix = [eos] if isinstance(eos, int) else sorted(self.chat.stop_ids)[:1]
        return Engine(self.adapter, make_method(method, settings), reference_prefix=prefix)

    def _info(self, cell: Cell) -> RunInfo:
        setup = self.setup
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
            seed=setup.seed,
            sample_order_sha256=setup.order_sha256,
            n=len(setup.samples),
            max_new_tokens=setup.max_new_tokens,
            workflow=setup.workload.workflow.name,
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
        e2e_s=result.times.e2e + step.observe_s,
        times_s={**asdict(result.times), "observe": step.observe_s},
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
            }
        },
    )


def apply_settings(
    methods: Sequence[str], defaults: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Settings per method: the profile's, then ``key=value`` or ``method.key=value`` overrides.

    A bare key goes to every chosen method that has such a setting.

    Raises:
        UserError: a key that no chosen method has.
    """
    chosen = {name: dict(defaults.get(name, {})) for name in methods}
    for key, value in overrides.items():
        owner, _, setting = key.rpartition(".")
        targets = [owner] if owner else [m for m in methods if key in setting_names(find_method(m))]
        if not targets or any(t not in chosen for t in targets):
            known = sorted({f for m in methods for f in setting_names(find_method(m))})
            raise UserError(
                f"no chosen method has a setting {key!r}{suggestion(key, tuple(known))}"
            )
        for target in targets:
            chosen[target][setting] = value
    return chosen
