"""What may stand together: runs of one setting, repetitions of one cell, no copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from results.analysis import Analysis
from results.errors import TableError
from results.records import Run

T = TypeVar("T")

# What two runs must share to stand in one table without a label ...
_COMPARABLE = (
    "engine",
    "model",
    "model_revision",
    "dtype",
    "attention",
    "device",
    "hardware",
    "data",
)
# ... and what they must share in addition if they ran the same benchmark.
_COMPARABLE_IN_BENCH = (
    "data_sha256",
    "workflow",
    "workload_label",
    "max_new_tokens",
    "final_tokens",
)


def split_settings(runs: Sequence[Run]) -> Iterator[tuple[str, list[Run]]]:
    """Group runs that may share a table unlabelled; a label names what differs ("" if nothing)."""
    differing = [name for name in _COMPARABLE if len({getattr(run.info, name) for run in runs}) > 1]
    groups: dict[str, list[Run]] = {}
    for label, alike in _labelled(runs, lambda run: [_named(run, name) for name in differing]):
        # Only among runs that are alike otherwise does it matter what a benchmark was run on.
        for part, group in _labelled(alike, _within_benches(alike)):
            groups[", ".join(filter(None, (label, part)))] = group
    yield from sorted(groups.items())


def _within_benches(runs: Sequence[Run]) -> Callable[[Run], list[str]]:
    """What tells a run from others of its benchmark."""
    benches = {run.info.bench for run in runs}
    differing = [
        name
        for name in _COMPARABLE_IN_BENCH
        if len({(run.info.bench, getattr(run.info, name)) for run in runs}) > len(benches)
    ]
    first = {run.info.run_key: _first_evaluated(run) for run in runs}
    evaluated = {(r.info.bench, first[r.info.run_key]) for r in runs if first[r.info.run_key]}
    splits = len(evaluated) > len({bench for bench, _ in evaluated})

    def parts(run: Run) -> list[str]:
        start = f"evaluated from {first[run.info.run_key] or 'no sample yet'}"
        return [_named(run, name) for name in differing] + ([start] if splits else [])

    return parts


def _labelled(made: Sequence[T], parts: Callable[[T], list[str]]) -> Iterator[tuple[str, list[T]]]:
    groups: dict[str, list[T]] = {}
    for one in made:
        groups.setdefault(", ".join(parts(one)), []).append(one)
    yield from groups.items()


def _named(run: Run, name: str) -> str:
    return f"{name}={str(getattr(run.info, name))[:64]}"


def _first_evaluated(run: Run) -> str | None:
    """First sample of a replay that is no warm-up: other requests, calibrated on others again."""
    return next((row.sample_id for row in run.fidelity if not row.warm), None)


def split_analyses(analyses: Sequence[Analysis]) -> Iterator[tuple[str, list[Analysis]]]:
    """The same for analyses, which say what they are from in their provenance."""
    differing = [
        name
        for name in ("model", "dtype", "device", "data")
        if len({analysis.provenance.get(name) for analysis in analyses}) > 1
    ]

    def parts(analysis: Analysis) -> list[str]:
        return [f"{name}={analysis.provenance.get(name)}" for name in differing]

    yield from sorted(_labelled(analyses, parts))


def check_repetitions(runs: Sequence[Run]) -> None:
    """Refuse to average runs of one method on one benchmark that do not repeat one another.

    Raises TableError unless they differ in the seed and have the same settings.
    """
    by_seed: dict[int, Run] = {}
    for run in runs:
        what = f"{run.info.method} on {run.info.bench}"
        if run.info.settings != runs[0].info.settings:
            raise TableError(
                f"{runs[0].name} and {run.name} are both {what} but differ in their settings; "
                "give one a label"
            )
        if other := by_seed.get(run.info.seed):
            raise TableError(
                f"{other.name} and {run.name} both measure {what} with seed {run.info.seed}; "
                "use one of them"
            )
        by_seed[run.info.seed] = run


def refuse_copies(runs: Sequence[Run]) -> None:
    """Raise TableError if two of the runs are the same one."""
    seen: dict[str, Run] = {}
    for run in runs:
        if other := seen.get(run.info.run_key):
            raise TableError(f"{other.name} and {run.name} are copies of run {run.info.run_key}")
        seen[run.info.run_key] = run
