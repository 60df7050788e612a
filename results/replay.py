"""Replays of recorded trajectories, grouped and selected as every fidelity table needs them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from results.comparable import check_repetitions
from results.errors import TableError
from results.names import display_name, method_order
from results.records import Run
from results.schema import FidelityEdge, FidelityRecord
from results.tables import Column

TurnKey = tuple[str, int]
"""Sample and position in its trajectory: the same prompt for every method."""

CELL_COLUMNS = (
    Column("bench", "Bench", "string"),
    Column("method", "Method", "string"),
    Column("variant", "Variant", "string", hide_if_empty=True),
    Column("pool_state", "Pool at start", "string"),
)


class Cell(NamedTuple):
    """A method as one table shows it; ``n`` (planned samples) keeps a longer repetition apart."""

    bench: str
    method: str
    label: str
    pool_state: str
    n: int


@dataclass(frozen=True)
class Replay:
    """All runs of one cell; they differ in the seed (the order of samples) alone."""

    cell: Cell
    runs: tuple[Run, ...]

    @cached_property
    def turns(self) -> tuple[FidelityRecord, ...]:
        """Evaluated turns: all but those that only filled the pools."""
        return tuple(turn for run in self.runs for turn in run.fidelity if not turn.warm)

    @cached_property
    def reuse_turns(self) -> tuple[FidelityRecord, ...]:
        """Evaluated turns in which there was something to reuse."""
        return tuple(turn for turn in self.turns if reusable(turn))

    @property
    def edges(self) -> Iterator[tuple[str, FidelityEdge]]:
        """Edges on which there was something to reuse, each with the id of its sample."""
        for turn in self.reuse_turns:
            for edge in reusable(turn):
                yield turn.sample_id, edge

    @property
    def workflows(self) -> int:
        """Evaluated workflows, every repetition counted."""
        return sum(len({t.sample_index for t in run.fidelity if not t.warm}) for run in self.runs)

    @property
    def n_warm(self) -> int:
        """Distinct samples that only filled the pools."""
        return len({turn.sample_id for run in self.runs for turn in run.fidelity if turn.warm})

    def names(self) -> dict[str, object]:
        """Values of :data:`CELL_COLUMNS`."""
        return {
            "bench": self.cell.bench,
            "method": display_name(self.cell.method),
            "variant": self.cell.label,
            "pool_state": self.cell.pool_state,
        }


def reusable(turn: FidelityRecord) -> list[FidelityEdge]:
    """Edges on which the method had something to reuse: not empty, and held by somebody before."""
    return [edge for edge in turn.edges if edge.tokens and not edge.first]


def accepted(edge: FidelityEdge) -> bool:
    """Whether the method did anything but execute the segment densely."""
    return edge.action != "dense"


def replays(runs: Sequence[Run]) -> list[Replay]:
    """Group runs by cell: benchmarks by name, methods in the paper's order.

    Raises TableError for runs that do not repeat one another, and where two runs replayed different
    prompts as the same turn of the same sample.
    """
    _check_prompts(runs)
    cells: dict[Cell, list[Run]] = defaultdict(list)
    for run in runs:
        info = run.info
        cells[Cell(info.bench, info.method, info.label, info.pool_state, info.n)].append(run)
    for repeated in cells.values():
        check_repetitions(repeated)
    ordered = sorted(cells, key=lambda cell: (cell.bench, method_order(cell.method), cell))
    return [Replay(cell, tuple(cells[cell])) for cell in ordered]


def _check_prompts(runs: Iterable[Run]) -> None:
    seen: dict[tuple[str, str, int], tuple[str, Run]] = {}
    for run in runs:
        for turn in run.fidelity:
            key = (run.info.bench, turn.sample_id, turn.turn_index)
            sha256, other = seen.setdefault(key, (turn.prompt_sha256, run))
            if sha256 != turn.prompt_sha256:
                raise TableError(
                    f"{other.name} and {run.name} replayed different prompts as turn "
                    f"{turn.turn_index} of sample {turn.sample_id}; use one recorded trajectory"
                )
