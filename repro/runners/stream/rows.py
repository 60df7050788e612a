"""From a turn of a single stream to its row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvcmas.engine.session import Engine, TurnResult
from repro.runners.hop_costs import HopCosts
from repro.runners.hop_costs import Work as Costs
from repro.runners.rows import edge_records, measured
from repro.runners.stream.memory import held_bytes
from results.records import SampleRecord
from results.stream_record import StreamRecord
from results.stream_schema import PeakBytes, Work


@dataclass(frozen=True)
class Place:
    """Where a turn stands: in which run and workflow, and at which position of it."""

    key: str
    workflow: int
    request: str
    position: int


def turn_row(
    place: Place,
    result: TurnResult,
    engine: Engine,
    *,
    weights: int,
    transient: int | None,
    peak: PeakBytes,
) -> StreamRecord:
    """The row of a turn that handed out its buffer.

    Args:
        weights: bytes of the model.
        transient: bytes that learning from a turn holds for a moment.
    """
    return StreamRecord(
        run_key=place.key,
        sample_id=place.request,
        sample_index=place.workflow,
        node=result.node,
        turn_index=place.position,
        **measured(result, engine),
        ttft_s=result.times.ttft,
        e2e_s=result.times.e2e,
        times_s=asdict(result.times),
        edges=tuple(edge_records(result)),
        output_tokens=len(result.output),
        row_layers=result.accounting.row_layers,
        work=tuple(_phases(result, engine)),
        memory=held_bytes(weights, result, engine, transient),
        peak=peak,
    )


def end_of_workflow(place: Place, rows: Sequence[StreamRecord]) -> SampleRecord:
    """The row that ends a workflow."""
    return SampleRecord(
        run_key=place.key,
        sample_id=place.request,
        sample_index=place.workflow,
        correct=None,
        extracted=None,
        expected="",
        failure=None,
        outputs={},
        e2e_s=sum(row.e2e_s for row in rows),
        ttft_mean_s=sum(row.ttft_s for row in rows) / len(rows),
    )


def _phases(result: TurnResult, engine: Engine) -> list[Work]:
    """What the first token took, by formula from what was really executed and filled."""
    costs, prompt = HopCosts(engine.executor.model.spec), result.prompt
    filled = [d.segment for d in result.decisions if d.action != "dense"]
    phases = [
        _work("model", costs.model(result.accounting)),
        _work("fills", costs.fills(engine.method, [len(prompt.segments[i]) for i in filled])),
    ]
    if tokens := result.accounting.reference_tokens:
        phases.append(_work("reference", costs.reference(tokens)))
    return phases


def _work(phase: str, costs: Costs) -> Work:
    return Work.model_validate({"phase": phase, "flops": costs.flops, "moved_bytes": costs.nbytes})
