from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvcmas.engine.segments import Prompt, pf
from repro.runners import record as module
from repro.runners.record import record
from repro.runners.trajectory import Runner
from traces.schema import TraceSegment, TraceTurn, TraceWorkflow
from workloads.base import Sample

SAMPLES = tuple(Sample(str(i), "?", "0") for i in range(4))


@dataclass
class FakeRunner:
    ran: list[str]

    def run(self, sample: Sample) -> SimpleNamespace:
        self.ran.append(sample.id)
        result = SimpleNamespace(prompt=Prompt((pf((1,)),)))
        return SimpleNamespace(sample=sample, steps=(SimpleNamespace(result=result),))


def fake(monkeypatch: Any) -> FakeRunner:
    turn = TraceTurn(agent=0, parents=(), segments=(TraceSegment(slot=None, ids=(1,)),), output=())

    def recorded(trajectory: SimpleNamespace, runner: FakeRunner) -> TraceWorkflow:
        return TraceWorkflow(request=trajectory.sample.id, turns=(turn,))

    monkeypatch.setattr(module, "recorded", recorded)
    return FakeRunner([])


def test_an_interrupted_recording_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    partial = tmp_path / "trace.partial"
    first = fake(monkeypatch)
    rows = record(cast(Runner, first), SAMPLES, partial)
    next(rows), next(rows)
    rows.close()
    with partial.open("ab") as file:
        file.write(b'{"request": "torn')
    second = fake(monkeypatch)
    whole = list(record(cast(Runner, second), SAMPLES, partial))
    assert [workflow.request for workflow in whole] == ["0", "1", "2", "3"]
    assert second.ran == ["2", "3"]
    assert list(record(cast(Runner, FakeRunner([])), SAMPLES, partial)) == whole
