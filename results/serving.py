"""Serving runs as cells: the percentiles and speed-ups that tables, figures and claims share.

A cell is one method (or variant) under one load; its runs differ in the seed of arrivals and
schedule alone. Speed-ups are ratios of percentiles over the same requests under the same load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from results import stats
from results.comparable import check_repetitions
from results.errors import TableError
from results.names import method_order
from results.records import Run
from results.schema import SERVED_MODES, LostRequest, RequestRecord, ServeInfo
from results.stats import Estimate

BOOTSTRAP_SEED: Final = 0
# A 90th percentile of fewer requests is little more than their maximum.
LEAST_FOR_P90: Final = 40
EXACT: Final = "nonshared"

RequestKey = tuple[int, str, int]
"""Seed, workflow and position in it: the same prompt under the same arrivals."""


class Load(NamedTuple):
    """What two methods must share to be compared: trace, arrivals, rate and how time was kept."""

    bench: str
    trace_sha256: str
    arrival: str
    qps: float
    clock: str
    decode: bool


class CellKey(NamedTuple):
    """One row of a serving table."""

    load: Load
    rho: float
    rho_kind: str
    method: str
    label: str
    pool: str


@dataclass(frozen=True)
class ServedCell:
    """All runs of one cell."""

    key: CellKey
    runs: tuple[Run, ...]

    @property
    def serve(self) -> ServeInfo:
        """The cell as its first run describes it."""
        return serve_of(self.runs[0])

    @cached_property
    def requests(self) -> dict[RequestKey, RequestRecord]:
        """Answered requests of all runs."""
        return {
            (run.info.seed, row.sample_id, row.turn_index): row
            for run in self.runs
            for row in run.requests
        }

    @property
    def lost(self) -> int:
        """Requests that failed or did not finish."""
        return sum(len(run.lost) for run in self.runs)

    @property
    def out_of_memory(self) -> bool:
        """Not run, because it needs more memory than there is."""
        return self.serve.out_of_memory

    def ttft(self, q: float) -> Estimate:
        """Percentile of TTFT (s); NaN for a 90th of too few requests."""
        if too_few(q, len(self.requests)):
            return Estimate(*[float("nan")] * 3)
        return self.percentile(lambda row: row.ttft_s, q)

    def percentile(self, value: Callable[[RequestRecord], float], q: float) -> Estimate:
        """Percentile of a value over all requests; interval over workflows."""
        return stats.cluster_percentile(
            [value(row) for row in self.requests.values()],
            [cluster(key) for key in self.requests],
            q,
            seed=BOOTSTRAP_SEED,
        )

    def spread(self, q: float) -> tuple[float, float]:
        """Lowest and highest percentile of TTFT (s) among the runs; NaN for a single run."""
        if len(self.runs) < 2 or too_few(q, len(self.requests)):
            return float("nan"), float("nan")
        each = [stats.percentile([row.ttft_s for row in run.requests], q) for run in self.runs]
        return min(each), max(each)


def of_mode(runs: Iterable[Run], mode: str = "real") -> list[Run]:
    """Serving runs that came about in one way: real, emulated or modelled."""
    return [run for run in runs if SERVED_MODES.get(run.info.kind) == mode]


def serve_of(run: Run) -> ServeInfo:
    """The cell of a serving run.

    Raises:
        TableError: a run of another kind.
    """
    if run.info.serve is None:
        raise TableError(f"{run.name} is no serving run")
    return run.info.serve


def too_few(q: float, requests: int) -> bool:
    """Whether a percentile would say more than so many requests can."""
    return q > 50 and requests < LEAST_FOR_P90


def cluster(key: RequestKey) -> str:
    """Requests of one workflow under one seed are not independent."""
    return f"{key[0]} {key[1]}"


def load_of(run: Run) -> Load:
    """The load a run was under."""
    serve = serve_of(run)
    return Load(
        bench=run.info.bench,
        trace_sha256=run.info.data_sha256,
        arrival=serve.arrival,
        qps=serve.qps,
        clock=serve.clock,
        decode=serve.decode,
    )


def served_cells(runs: Iterable[Run]) -> list[ServedCell]:
    """Group serving runs; traces by length, then loads, then methods in the paper's order.

    Raises TableError for runs that claim the same cell and seed, where two methods were given
    different prompts as the same request, and for runs that came about in different ways.
    """
    grouped: dict[CellKey, list[Run]] = defaultdict(list)
    prompts: dict[tuple[str, str, int], tuple[str, Run]] = {}
    modes: set[str] = set()
    for run in runs:
        serve = serve_of(run)
        modes.add(serve.mode)
        key = CellKey(
            load_of(run), serve.rho, serve.rho_kind, run.info.method, run.info.label, serve.pool
        )
        grouped[key].append(run)
        _check_prompts(run, prompts)
    if len(modes) > 1:
        raise TableError(f"{' and '.join(sorted(modes))} cells are never put together")
    for repeated in grouped.values():
        check_repetitions(repeated)
    cells = [ServedCell(key, tuple(found)) for key, found in grouped.items()]
    return sorted(cells, key=_order)


def speed_up(cell: ServedCell, cells: Iterable[ServedCell], q: float) -> Estimate:
    """NonShared's percentile over this cell's, under the same load."""
    dense = next((c for c in cells if c.key.method == EXACT and c.key.load == cell.key.load), None)
    return Estimate(*[float("nan")] * 3) if dense is None else ratio(dense, cell, q)


def ratio(numerator: ServedCell, denominator: ServedCell, q: float) -> Estimate:
    """Ratio of the percentiles of TTFT over the requests that both answered."""
    common = [key for key in numerator.requests if key in denominator.requests]
    if too_few(q, len(common)):
        return Estimate(*[float("nan")] * 3)
    return stats.percentile_ratio(
        [numerator.requests[key].ttft_s for key in common],
        [denominator.requests[key].ttft_s for key in common],
        [cluster(key) for key in common],
        q,
        seed=BOOTSTRAP_SEED,
    )


def in_comparison(cells: Sequence[ServedCell], rho: float) -> list[ServedCell]:
    """Cells of one ratio, with those that have none of their own (NonShared, FullShared)."""
    return [cell for cell in cells if cell.key.rho == rho or cell.key.rho_kind in ("none", "all")]


def ratios_of(cells: Iterable[ServedCell]) -> list[float]:
    """Reuse ratios under comparison, the highest first."""
    found = {cell.key.rho for cell in cells if cell.key.rho_kind not in ("none", "all")}
    return sorted(found, reverse=True)


def _check_prompts(run: Run, seen: dict[tuple[str, str, int], tuple[str, Run]]) -> None:
    rows: list[RequestRecord | LostRequest] = [*run.requests, *run.lost]
    for row in rows:
        key = (run.info.data_sha256, row.sample_id, row.turn_index)
        sha256, other = seen.setdefault(key, (row.prompt_sha256, run))
        if sha256 != row.prompt_sha256:
            raise TableError(
                f"{other.name} and {run.name} served different prompts as turn {row.turn_index} of"
                f" {row.sample_id}"
            )


def _order(cell: ServedCell) -> tuple[object, ...]:
    serve, key = cell.serve, cell.key
    size = (serve.layout, serve.shared_tokens, serve.output_tokens, serve.scale)
    return (*size, *key.load, method_order(key.method), key.label, -key.rho, key.pool)
