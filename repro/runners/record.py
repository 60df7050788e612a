"""`repro record`: NonShared trajectories as a trace, for replay under every method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcmas.errors import UserError
from repro.runners.trajectory import Runner, Trajectory
from traces.features import features_folder, save_features
from traces.schema import TraceTurn, TraceWorkflow, write_trace
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


def record(
    runner: Runner,
    samples: tuple[Sample, ...],
    partial: Path,
    after: Callable[[int], None] = lambda done: None,
) -> Iterator[TraceWorkflow]:
    """Every sample's trace, in order; those that ``partial`` holds are not run again.

    ``partial`` grows by one line per sample, so that an interrupted recording goes on. The features
    of pictures lie in a folder beside it. ``after`` is told of each sample that was run how many
    there are now.

    Raises:
        UserError: the file cannot be read or written.
    """
    try:
        done = _read_partial(partial)
        yield from done
        with partial.open("ab") as file:
            file.truncate(sum(len(_line(workflow)) for workflow in done))
            for count, sample in enumerate(samples[len(done) :], start=len(done) + 1):
                trajectory = runner.run(sample)
                workflow = recorded(trajectory, runner)
                save_features(features_folder(partial), trajectory.steps[0].result.prompt)
                file.write(_line(workflow))
                file.flush()
                yield workflow
                after(count)
    except OSError as error:
        raise UserError(f"cannot record to {partial}: {error.strerror}") from error


def record_trace(
    path: Path,
    runner: Runner,
    samples: tuple[Sample, ...],
    origin: dict[str, Any],
    follow: Callable[[Iterable[TraceWorkflow]], Iterable[TraceWorkflow]] = lambda rows: rows,
    after: Callable[[int], None] = lambda done: None,
) -> None:
    """Record ``samples`` as the trace file ``path``; an interrupted recording goes on.

    ``follow`` is handed the workflows as they come, for a progress bar; ``after`` as for
    :func:`record`.

    Raises:
        UserError: a file cannot be read or written.
    """
    partial = path.with_suffix(".partial")
    workflows = list(follow(record(runner, samples, partial, after)))
    write_trace(
        path,
        workflows,
        kind="recorded",
        topology=runner.workload.workflow.name,
        vocab=runner.engine.executor.model.spec.vocab,
        origin=origin,
    )
    partial.unlink(missing_ok=True)


def _read_partial(path: Path) -> list[TraceWorkflow]:
    """Complete lines; a torn last one is the rest of an interrupted write."""
    done: list[TraceWorkflow] = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            done.append(TraceWorkflow.model_validate_json(line))
        except ValidationError:
            break
    return done


def _line(workflow: TraceWorkflow) -> bytes:
    return workflow.model_dump_json().encode() + b"\n"
