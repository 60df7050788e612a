"""From results of the open loop to rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from repro.runners.serving.loop import Answered, Lost, Result
from results.records import LostRequest, RequestRecord, RunWriter, SampleRecord
from traces.schema import TraceWorkflow

Row = RequestRecord | LostRequest


def write_cell(
    writer: RunWriter, key: str, workflows: Sequence[TraceWorkflow], results: Sequence[Result]
) -> None:
    """Append every workflow with its requests; ``results`` are in the trace's order."""
    remaining = iter(results)
    for index, workflow in enumerate(workflows):
        own = [next(remaining) for _ in workflow.turns]
        rows = [_row(key, index, position, result) for position, result in enumerate(own)]
        writer.append_sample(rows, _end_of_workflow(key, index, workflow, rows))


def _row(key: str, sample_index: int, position: int, result: Result) -> Row:
    return (
        _lost(key, sample_index, position, result)
        if isinstance(result, Lost)
        else _answered(key, sample_index, position, result)
    )


def _answered(key: str, sample_index: int, position: int, result: Answered) -> RequestRecord:
    served = result.served
    return RequestRecord(
        run_key=key,
        sample_id=served.request.workflow.request,
        sample_index=sample_index,
        node=served.request.turn.node.name,
        turn_index=position,
        **served.measured,
        ttft_s=served.first_token - result.arrival,
        e2e_s=served.finished - result.arrival,
        arrival_s=result.arrival,
        released_s=result.released,
        started_s=served.started,
        finished_s=served.finished,
        inter_token_s=tuple(later - earlier for earlier, later in pairwise(served.token_times)),
        fallback=served.fallback,
    )


def _lost(key: str, sample_index: int, position: int, result: Lost) -> LostRequest:
    return LostRequest(
        run_key=key,
        sample_id=result.request.workflow.request,
        sample_index=sample_index,
        node=result.request.turn.node.name,
        turn_index=position,
        prompt_sha256=result.request.prompt.sha256,
        arrival_s=result.arrival,
        state=result.state,
        reason=result.reason,
    )


def _end_of_workflow(
    key: str, index: int, workflow: TraceWorkflow, rows: Sequence[Row]
) -> SampleRecord:
    answered = [row for row in rows if isinstance(row, RequestRecord)]
    ttfts = [row.ttft_s for row in answered]
    begin = min((row.arrival_s for row in answered), default=0.0)
    return SampleRecord(
        run_key=key,
        sample_id=workflow.request,
        sample_index=index,
        correct=None,
        extracted=None,
        expected="",
        failure=None,
        outputs={},
        e2e_s=max((row.finished_s for row in answered), default=0.0) - begin,
        ttft_mean_s=sum(ttfts) / len(ttfts) if ttfts else None,
    )
