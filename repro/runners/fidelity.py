"""`repro fidelity`: what each method's caches and answers miss on identical recorded ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.registry import make_method
from repro.runners.checkpoint import Checkpoint
from repro.runners.first_tokens import divergence
from repro.runners.replay import replay
from repro.runners.rows import edge_records, measured
from results.records import RunInfo, RunWriter, SampleRecord
from results.schema import FidelityEdge, FidelityRecord
from traces.schema import Trace, TraceWorkflow


@dataclass(frozen=True)
class FidelityCell:
    """One method (or variant) of a fidelity run.

    Attributes:
        accept_all: accept every correction instead of asking the gate.
    """

    method: str
    settings: Mapping[str, Any]
    label: str
    key: str
    directory: Path
    accept_all: bool = False


@dataclass(frozen=True)
class _Exact:
    """A turn under dense prefill: its buffer and the logits of its first answer tokens."""

    result: TurnResult
    answer: Tensor


class Fidelity:
    """Replays workflows under every cell beside a dense run of the same ids.

    The first ``warm`` workflows only fill the pools, with every correction refused; methods that
    learn nothing leave them out.

    Args:
        answer_tokens: how many answer tokens are compared, teacher-forced.
    """

    def __init__(
        self,
        adapter: TransformersAdapter,
        trace: Trace,
        *,
        warm: int,
        answer_tokens: int,
        reference_prefix: Sequence[int],
    ) -> None:
        self._adapter = adapter
        self._trace = trace
        self._warm = warm
        self._answer_tokens = answer_tokens
        self._prefix = tuple(reference_prefix)
        self._dense = Engine(adapter, NonShared())

    def run(self, cells: Sequence[tuple[FidelityCell, RunInfo]]) -> Iterator[int]:
        """Run what is missing; yields the number of workflows all cells have, the first at once.

        Workflows are the outer loop, so that methods are timed side by side and drift of the
        machine falls on all of them.
        """
        jobs = [self._open(cell, info) for cell, info in cells]
        done = min(job.next for job in jobs)
        yield done
        for index in range(done, len(self._trace.workflows)):
            exact: list[_Exact] | None = None
            for job in jobs:
                if job.next > index:
                    continue
                exact = exact or self._exact(self._trace.workflows[index])
                self._one(job, index, exact)
            yield index + 1

    def _open(self, cell: FidelityCell, info: RunInfo) -> _Job:
        writer = RunWriter(cell.directory, info)
        checkpoint = Checkpoint(cell.directory / "state")
        covered, state = checkpoint.load()
        done = min(covered, writer.completed())
        writer.truncate_to(done)
        engine = Engine(
            self._adapter, make_method(cell.method, cell.settings), reference_prefix=self._prefix
        )
        if done and state is not None:
            engine.load_state(state)
        left_out = 0 if engine.method.learns else self._warm
        return _Job(cell, engine, writer, checkpoint, left_out, done)

    def _exact(self, workflow: TraceWorkflow) -> list[_Exact]:
        topology = self._trace.header.topology
        results = replay(
            self._dense, workflow, topology, logits=self._answer_tokens - 1, keep_buffers=True
        )
        return [_Exact(r, self._answer(r)) for r in results]

    def _answer(self, result: TurnResult) -> Tensor:
        """Logits ``[answer tokens, vocab]`` from which the first recorded tokens were drawn."""
        first = result.first_logits[None]
        if result.continuation_logits is None:
            return first
        return torch.cat((first, result.continuation_logits))

    def _one(self, job: _Job, index: int, exact: Sequence[_Exact]) -> None:
        workflow, warm = self._trace.workflows[index], index < self._warm
        accept = False if warm else (True if job.cell.accept_all else None)
        rows = []
        turns = replay(
            job.engine,
            workflow,
            self._trace.header.topology,
            accept=accept,
            logits=self._answer_tokens - 1,
            keep_buffers=True,
        )
        for turn_index, (result, reference) in enumerate(zip(turns, exact, strict=True)):
            rows.append(self._record(job, workflow, turn_index, warm, result, reference))
        job.writer.append_sample(rows, _end_of_sample(job, workflow, rows))
        job.done += 1
        job.checkpoint.save(job.done, job.engine.state())

    def _record(
        self,
        job: _Job,
        workflow: TraceWorkflow,
        turn_index: int,
        warm: bool,
        result: TurnResult,
        exact: _Exact,
    ) -> FidelityRecord:
        actual = self._answer(result)
        log_exact = exact.answer.double().log_softmax(-1)
        return FidelityRecord(
            run_key=job.cell.key,
            sample_id=workflow.request,
            sample_index=job.done,
            node=result.node,
            turn_index=turn_index,
            last=turn_index == len(workflow.turns) - 1,
            warm=warm,
            **measured(result, job.engine),
            row_layers=result.accounting.row_layers,
            ttft_s=result.times.ttft,
            e2e_s=result.times.e2e,
            times_s=asdict(result.times),
            edges=tuple(_edges(result, exact.result)),
            answer_kl=tuple(divergence(e, a) for e, a in zip(log_exact, actual, strict=True)),
            answer_agree=tuple((log_exact.argmax(-1) == actual.argmax(-1)).tolist()),
        )


@dataclass
class _Job:
    """An open cell; of the trace it leaves out the first workflows, and has done some others."""

    cell: FidelityCell
    engine: Engine
    writer: RunWriter
    checkpoint: Checkpoint
    left_out: int
    done: int

    @property
    def next(self) -> int:
        """Index of the workflow to run next."""
        return self.left_out + self.done


def _edges(result: TurnResult, exact: TurnResult) -> Iterator[FidelityEdge]:
    if result.buffer is None or exact.buffer is None:
        raise ValueError("fidelity needs the turns' buffers")
    if result.prompt.sha256 != exact.prompt.sha256:
        raise ValueError("methods must see identical token ids")
    for decision, edge in zip(result.decisions, edge_records(result), strict=True):
        rows = result.prompt.rows(decision.segment)
        part = slice(rows.start, rows.stop)
        yield FidelityEdge(
            **edge.model_dump(),
            k_error=relative_errors(result.buffer.k[:, :, part], exact.buffer.k[:, :, part]),
            v_error=relative_errors(result.buffer.v[:, :, part], exact.buffer.v[:, :, part]),
        )


def relative_errors(actual: Tensor, exact: Tensor) -> tuple[float, ...]:
    """Per layer, Frobenius norm of the difference over that of ``exact`` (paper A.1).

    Both ``[layers, kv_heads, tokens, head_dim]``.
    """
    difference = (actual.double() - exact.double()).flatten(1).norm(dim=1)
    return tuple((difference / exact.double().flatten(1).norm(dim=1)).tolist())


def _end_of_sample(
    job: _Job, workflow: TraceWorkflow, rows: Sequence[FidelityRecord]
) -> SampleRecord:
    ttfts = [row.ttft_s for row in rows if row.ttft_s is not None]
    return SampleRecord(
        run_key=job.cell.key,
        sample_id=workflow.request,
        sample_index=job.done,
        correct=None,
        extracted=None,
        expected="",
        failure=None,
        outputs={},
        e2e_s=sum(row.e2e_s for row in rows),
        ttft_mean_s=sum(ttfts) / len(ttfts) if ttfts else None,
    )
