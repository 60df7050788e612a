"""Single-stream runs as cells: the numbers that tables, figures and claims share.

A cell is one method (or variant) on one shape of workflow. Every method is given the same prompts,
so that times are compared turn by turn and bootstrapped by workflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from results import stats
from results.errors import TableError
from results.names import method_order
from results.records import Run, StreamRecord
from results.stats import Estimate
from results.stream_schema import Rates, StreamInfo

BOOTSTRAP_SEED: Final = 0
EXACT: Final = "nonshared"
# What differs between the variants that the paper's tables compare, not those of its ablations.
USUAL: Final = frozenset({"rho", "chained", "first_turn"})

TurnKey = tuple[str, int]
"""Workflow, and position in it."""


@dataclass(frozen=True)
class StreamCell:
    """One run of kind ``stream``."""

    run: Run

    @property
    def info(self) -> StreamInfo:
        """The cell as the run describes it."""
        return info_of(self.run)

    @property
    def method(self) -> str:
        """Registered name."""
        return self.run.info.method

    @property
    def label(self) -> str:
        """Variant."""
        return self.run.info.label

    @property
    def shape(self) -> tuple[str, str]:
        """Cells of one shape ran the same prompts."""
        return self.run.info.bench, self.run.info.data_sha256

    @cached_property
    def differs_in(self) -> frozenset[str]:
        """Settings that tell the variant from the method's defaults; ``rho`` counts as one."""
        return frozenset(part.partition("=")[0] for part in self.label.split())

    @cached_property
    def turns(self) -> Mapping[TurnKey, StreamRecord]:
        """All turns that were measured."""
        return {(row.sample_id, row.turn_index): row for row in self.run.streamed}

    @cached_property
    def later(self) -> Mapping[TurnKey, StreamRecord]:
        """All but the first turn of a workflow: the paper's reuse requests."""
        return {key: row for key, row in self.turns.items() if row.turn_index > 0}

    def ttft(self, *, all_turns: bool = False) -> Estimate:
        """Mean TTFT (s) of the reuse requests, or of all; interval over workflows."""
        rows = self.turns if all_turns else self.later
        return stats.cluster_bootstrap(
            [row.ttft_s for row in rows.values()],
            [request for request, _ in rows],
            seed=BOOTSTRAP_SEED,
        )

    def throughput(self) -> Estimate:
        """Trajectory tokens (all prompts and outputs) per second of end-to-end latency."""
        return self._per_second(lambda row: row.prompt_tokens + row.output_tokens)

    def generated(self) -> Estimate:
        """Generated tokens per second of end-to-end latency."""
        return self._per_second(lambda row: row.output_tokens)

    def _per_second(self, tokens: Callable[[StreamRecord], int]) -> Estimate:
        counts, seconds = self._by_workflow(tokens), self._by_workflow(lambda row: row.e2e_s)
        return stats.ratio_of_sums(counts, seconds, seed=BOOTSTRAP_SEED)

    def _by_workflow(self, value: Callable[[StreamRecord], float]) -> list[float]:
        sums: dict[str, float] = {}
        for (request, _), row in self.turns.items():
            sums[request] = sums.get(request, 0.0) + value(row)
        return list(sums.values())

    @property
    def held_bytes(self) -> int | None:
        """Most bytes of objects after any turn; None if nothing was run."""
        return max((row.memory.held for row in self.turns.values()), default=None)

    def shares(self) -> tuple[float, float, float]:
        """Share of the reuse requests' TTFT that computing, moving, and the slower of both explain.

        NaN if nothing was run.
        """
        rates, rows = self.info.rates, list(self.later.values())
        if rates is None or not rows:
            return (float("nan"),) * 3
        seconds = sum(row.ttft_s for row in rows)
        computed = sum(w.flops for row in rows for w in row.work) / rates.flops_per_s
        moved = sum(w.moved_bytes for row in rows for w in row.work) / rates.bytes_per_s
        slower = sum(roofline_s(row, rates) for row in rows)
        return computed / seconds, moved / seconds, slower / seconds


def roofline_s(row: StreamRecord, rates: Rates) -> float:
    """Time of a turn's phases if each ran at the machine's rate: the slower of its two sides."""
    return sum(
        max(work.flops / rates.flops_per_s, work.moved_bytes / rates.bytes_per_s)
        for work in row.work
    )


def info_of(run: Run) -> StreamInfo:
    """The cell of a single-stream run.

    Raises:
        TableError: a run of another kind.
    """
    if run.info.stream is None:
        raise TableError(f"{run.name} is no single stream")
    return run.info.stream


def stream_cells(runs: Iterable[Run]) -> list[StreamCell]:
    """Cells by shape, methods in the paper's order, the highest reuse first.

    Raises TableError for two runs of one cell, and where two were given different prompts as the
    same turn of one trace.
    """
    known: dict[tuple[object, ...], Run] = {}
    prompts: dict[tuple[str, str, int], tuple[str, Run]] = {}
    cells = []
    for run in runs:
        cell = StreamCell(run)
        key = (*cell.shape, run.info.model, cell.method, cell.label, cell.info.load)
        if other := known.get(key):
            raise TableError(f"{other.name} and {run.name} both measure {cell.method} {cell.label}")
        known[key] = run
        cells.append(cell)
        for row in run.streamed:
            turn = (run.info.data_sha256, row.sample_id, row.turn_index)
            sha256, first = prompts.setdefault(turn, (row.prompt_sha256, run))
            if sha256 != row.prompt_sha256:
                raise TableError(
                    f"{first.name} and {run.name} ran different prompts as turn {row.turn_index}"
                    f" of {row.sample_id}"
                )
    return sorted(cells, key=_order)


def usual(cells: Iterable[StreamCell]) -> list[StreamCell]:
    """Cells of the comparison between methods, without those of ablations."""
    return [cell for cell in cells if cell.differs_in <= USUAL]


def ratio(upper: StreamCell, lower: StreamCell, *, all_turns: bool = False) -> Estimate:
    """Ratio of the mean TTFTs over the turns that both ran; interval over workflows."""
    mine = upper.turns if all_turns else upper.later
    other = lower.turns if all_turns else lower.later
    sums: dict[str, list[float]] = {}
    for key, row in mine.items():
        if key in other:
            pair = sums.setdefault(key[0], [0.0, 0.0])
            pair[0] += row.ttft_s
            pair[1] += other[key].ttft_s
    return stats.ratio_of_sums(
        [pair[0] for pair in sums.values()],
        [pair[1] for pair in sums.values()],
        seed=BOOTSTRAP_SEED,
    )


def dense_of(cell: StreamCell, cells: Sequence[StreamCell]) -> StreamCell | None:
    """NonShared on the same prompts, if it ran."""
    same = (c for c in cells if c.method == EXACT and c.shape == cell.shape and c.turns)
    return next(same, None)


def _order(cell: StreamCell) -> tuple[object, ...]:
    info = cell.info
    shape = (info.layout, info.shared_tokens, info.agents, info.rounds, info.scale)
    name = (method_order(cell.method), -(1.0 if info.rho is None else info.rho), cell.label)
    return (*shape, *cell.shape, *name)
