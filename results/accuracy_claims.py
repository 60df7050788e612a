"""Claims about latency on the accuracy workloads: C20 and C21, from accuracy runs.

Latency and TTFT are of a single stream and paired by question. Trajectories are the methods' own,
so that a difference holds the length of what they generate, as in the paper. Models without
training are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from results import stats
from results.accuracy import BOOTSTRAP_SEED, Cell, grouped
from results.benches import bench_name
from results.claims import Claim
from results.comparable import split_settings
from results.names import RANDOM_WEIGHTS, display_name
from results.records import Run
from results.schema import SampleRecord
from results.verdicts import Evaluation, Measured, evaluates

_DELTA: Final = ("graphflow", "kvcomm")
_SELECTIVE: Final = ("droidspeak", "cacheblend", "relaycaching")
# The benchmark on which the paper's KVCMAS is not faster than the selective methods.
_EXCEPTION: Final = "gsm8k"

Value = Callable[[SampleRecord], float | None]
Cells = Mapping[Cell, Sequence[Run]]


@evaluates("C20")
def _fastest_of_delta_methods(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """KVCMAS minus GraphFlow and KVComm, latency and TTFT, on every benchmark measured."""
    return _compared(runs, _DELTA, {"latency s": _latency, "TTFT s": _ttft}, ())


@evaluates("C21")
def _faster_than_selective(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """KVCMAS minus the selective methods, latency, on every benchmark measured but GSM8K."""
    return _compared(runs, _SELECTIVE, {"latency s": _latency}, (_EXCEPTION,))


def _compared(
    runs: Sequence[Run],
    rivals: Sequence[str],
    values: Mapping[str, Value],
    not_judged: Sequence[str],
) -> Evaluation | None:
    """KVCMAS below every rival in every value; benchmarks that are not judged are shown."""
    judged: list[Measured] = []
    shown: list[Measured] = []
    used: list[Run] = []
    for cells in _settings(runs):
        for bench in dict.fromkeys(cell.bench for cell in cells):
            own = _kvcmas(cells, bench)
            if own is None:
                continue
            for cell, repeats in cells.items():
                if cell.bench != bench or cell.method not in rivals:
                    continue
                found = [
                    _difference(name, cells[own], repeats, value) for name, value in values.items()
                ]
                (shown if bench in not_judged else judged).extend(found)
                used += [*cells[own], *repeats]
    if not judged:
        return None
    return Evaluation(
        "agrees" if all(one.high < 0 for one in judged) else "disagrees",
        (*judged, *shown),
        tuple(dict.fromkeys(run.info.run_key for run in used)),
        "; ".join(
            dict.fromkeys(
                f"{run.info.bench} ({run.info.data}), {run.info.model}, {run.info.engine},"
                f" {run.info.hardware}, n = {len(run.samples)}"
                for run in used
            )
        ),
    )


def _settings(runs: Iterable[Run]) -> list[Cells]:
    chosen = [
        run for run in runs if run.info.kind == "accuracy" and run.info.model not in RANDOM_WEIGHTS
    ]
    return [grouped(same) for _, same in split_settings(chosen)]


def _kvcmas(cells: Cells, bench: str) -> Cell | None:
    """Chained KVCMAS: calibrated for a reuse ratio where it was, else at its threshold."""
    own = [
        cell
        for cell, repeats in cells.items()
        if (cell.bench, cell.method) == (bench, "kvcmas")
        and repeats[0].info.settings.get("chained")
    ]
    return max(own, key=lambda cell: cells[cell][0].info.target_rho or 0.0, default=None)


def _difference(name: str, own: Sequence[Run], other: Sequence[Run], value: Value) -> Measured:
    mine, theirs = _by_question(own, value), _by_question(other, value)
    common = [key for key in mine if key in theirs]
    estimate = stats.paired_bootstrap(
        [mine[key] for key in common], [theirs[key] for key in common], seed=BOOTSTRAP_SEED
    )
    info = other[0].info
    rival = f"{display_name(info.method)} {info.label}".strip()
    return Measured(f"{name}, KVCMAS - {rival}, {bench_name(info.bench)}", *estimate)


def _by_question(runs: Sequence[Run], value: Value) -> dict[str, float]:
    """Mean over repetitions; questions without a value are left out."""
    found: dict[str, list[float]] = {}
    for run in runs:
        for sample in run.samples:
            if (measured := value(sample)) is not None:
                found.setdefault(sample.sample_id, []).append(measured)
    return {key: stats.mean(repeated) for key, repeated in found.items()}


def _latency(sample: SampleRecord) -> float:
    return sample.e2e_s


def _ttft(sample: SampleRecord) -> float | None:
    return sample.ttft_mean_s
