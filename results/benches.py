"""How the benchmarks are called and ordered wherever results are shown, and what the paper set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from results.records import Run

BENCHES: Mapping[str, str] = MappingProxyType(
    {
        "mmlu": "MMLU",
        "gsm8k": "GSM8K",
        "humaneval": "HumanEval",
        "mathvista": "MathVista",
        "videomme": "Video-MME",
    }
)
"""Benchmark name to display name, in the order of the paper's tables."""

PAPER_TAU: Mapping[str, float] = MappingProxyType(
    {"mmlu": 0.29, "gsm8k": 0.32, "humaneval": 0.34, "mathvista": 0.50, "videomme": 0.60}
)
"""KVCMAS's reliability threshold in the paper (B.1)."""


def bench_name(bench: str) -> str:
    """The paper's spelling of a benchmark, or the name itself for another one."""
    return BENCHES.get(bench, bench)


def bench_order(bench: str) -> tuple[int, str]:
    """Sort key: the paper's benchmarks in the paper's order, then all others by name."""
    known = list(BENCHES)
    return (known.index(bench) if bench in BENCHES else len(known), bench)


def unmeasured(runs: Sequence[Run], benches: Iterable[str], command: str) -> tuple[str, ...]:
    """A footer line that names the benchmarks without a run and the command that fills their cells.

    ``command`` has ``BENCH`` where the benchmark's name goes.
    """
    measured = {run.info.bench for run in runs}
    missing = [bench for bench in sorted(benches, key=bench_order) if bench not in measured]
    if not missing:
        return ()
    names = ", ".join(bench_name(bench) for bench in missing)
    return (f"not measured: {names}; made by: {command} (BENCH: {', '.join(missing)})",)
