from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from repro.runners import record as module
from repro.runners.record import record
from repro.runners.trajectory import Runner
from traces.schema import TraceSegment, TraceTurn, TraceWorkflow
from workloads.base import Sample

SAMPLES = tuple(Sample(str(i), "?", "0") for i in range(4))


@dataclass
class FakeRunner:
    ran: list[str]

    def run(self, sample: Sample) -> Sample:
        self.ran.append(sample.id)
        return sample


def fake(monkeypatch: Any) -> FakeRunner:
    turn = TraceTurn(agent=0, parents=(), segments=(TraceSegment(slot=None, ids=(1,)),), output=())
    monkeypatch.setattr(
        module, "recorded", lambda sample, runner: TraceWorkflow(request=sample.id, turns=(turn,))
    )
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
