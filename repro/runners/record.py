"""`repro record`: NonShared trajectories as a trace, for replay under every method."""

from __future__ import annotations

from collections.abc import Iterator

from repro.runners.trajectory import Runner, Trajectory
from traces.schema import TraceTurn, TraceWorkflow
from workloads.base import Sample


def recorded(trajectory: Trajectory, runner: Runner) -> TraceWorkflow:
    """One trajectory as token ids per segment."""
    workflow = runner.workload.workflow
    return TraceWorkflow(
        request=trajectory.sample.id,
        turns=tuple(
            TraceTurn.of(workflow[s.result.node], s.result.prompt, s.result.output)
            for s in trajectory.steps
        ),
    )


def record(runner: Runner, samples: tuple[Sample, ...]) -> Iterator[tuple[TraceWorkflow, bool]]:
    """Run every sample; yields its trace and whether its answer was right."""
    for sample in samples:
        trajectory = runner.run(sample)
        yield recorded(trajectory, runner), trajectory.score.correct
