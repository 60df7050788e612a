"""Tables 13, 14 and 15: a single stream over pool sizes, agents and rounds (paper C.3 to C.5)."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from results.records import Run
from results.stream import StreamCell, stream_cells, usual
from results.stream_quality import COLUMNS as QUALITY
from results.stream_quality import KINDS, quality, variant_of, with_notes
from results.stream_tables import (
    NAMES,
    REUSE,
    TIME,
    Row,
    footer,
    frame,
    header,
    memory,
    names,
    reuse,
    selected,
    times,
)
from results.tables import Column, register

POOL_COMMAND = "repro stream --profile cpu --study pool"
AGENTS_COMMAND = "repro stream --profile cpu --part agents"
ROUNDS_COMMAND = "repro stream --profile cpu --part rounds"

HELD = (
    Column("held_bytes", "Held GB", "Int64", digits=3, scale=1e-9),
    Column("pool_bytes", "Pool MB", "Int64", digits=1, scale=1e-6),
    Column("needed_bytes", "Calculated GB", "Int64", digits=3, scale=1e-9),
    Column("resident_bytes", "Peak RSS GB", "Int64", digits=3, scale=1e-9, hide_if_empty=True),
    Column("allocated_bytes", "Allocated GB", "Int64", digits=3, scale=1e-9, hide_if_empty=True),
)
POOL_COLUMNS = (*NAMES, Column("capacity", "V", "Int64"), *TIME, *HELD, *QUALITY, *REUSE)
AGENTS_COLUMNS = (*NAMES, Column("agents", "N", "Int64"), *TIME, *HELD, *REUSE)
ROUNDS_COLUMNS = (*NAMES, Column("rounds", "R", "Int64"), *TIME, *HELD, *REUSE)


def pools(runs: Sequence[Run]) -> list[StreamCell]:
    """KVCMAS over pool sizes, where more than one was run, with NonShared beside it."""
    cells = [cell for cell in stream_cells(_streams(runs)) if _one_round(cell)]
    own = [c for c in cells if c.method == "kvcmas" and c.differs_in <= _POOL]
    sizes: dict[tuple[str, str], set[object]] = {}
    for cell in own:
        sizes.setdefault(cell.shape, set()).add(capacity(cell))
    chosen = [
        cell
        for cell in cells
        if len(sizes.get(cell.shape, ())) > 1 and (cell in own or cell.method == "nonshared")
    ]
    return sorted(chosen, key=lambda cell: (cell.shape, capacity(cell) or 0))


def by_agents(runs: Sequence[Run]) -> list[StreamCell]:
    """The usual comparison on one round, for the model and context with several N."""
    return _varied([c for c in usual(stream_cells(_streams(runs))) if c.info.rounds == 1], "agents")


def by_rounds(runs: Sequence[Run]) -> list[StreamCell]:
    """The usual comparison with three agents, for the model and context with several R."""
    return _varied([c for c in usual(stream_cells(_streams(runs))) if c.info.agents == 3], "rounds")


def capacity(cell: StreamCell) -> int | None:
    """Anchors of a slot that the method may keep; None for one that keeps none."""
    value = cell.run.info.settings.get("capacity")
    return value if isinstance(value, int) else None


@register(
    "13",
    title="Pool size V of KVCMAS: cost of a single stream, accuracy and fidelity",
    columns=POOL_COLUMNS,
    kinds=("stream",),
    command=POOL_COMMAND,
    footer=with_notes(selected(footer, pools, POOL_COMMAND), pools),
    header=selected(header, pools, POOL_COMMAND),
    beside=KINDS,
)
def pool_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per V; TTFT is the mean over the reuse requests."""
    cells = pools(runs)
    known = quality(runs, map(variant_of, cells)).rows
    rows: list[Row] = [
        {
            **_row(cell, cells, all_turns=False),
            "capacity": capacity(cell),
            **known.get(variant_of(cell), {}),
        }
        for cell in cells
    ]
    return frame(rows, POOL_COLUMNS)


@register(
    "14",
    title="Single stream over the number of agents",
    columns=AGENTS_COLUMNS,
    kinds=("stream",),
    command=AGENTS_COMMAND,
    footer=selected(footer, by_agents, AGENTS_COMMAND),
    header=selected(header, by_agents, AGENTS_COMMAND),
)
def agents_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per N and method; TTFT is the mean over all requests."""
    cells = by_agents(runs)
    rows = [{**_row(c, cells, all_turns=True), "agents": c.info.agents} for c in cells]
    return frame(rows, AGENTS_COLUMNS)


@register(
    "15",
    title="Single stream over the number of rounds",
    columns=ROUNDS_COLUMNS,
    kinds=("stream",),
    command=ROUNDS_COMMAND,
    footer=selected(footer, by_rounds, ROUNDS_COMMAND),
    header=selected(header, by_rounds, ROUNDS_COMMAND),
)
def rounds_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per R and method; TTFT is the mean over all requests."""
    cells = by_rounds(runs)
    rows = [{**_row(c, cells, all_turns=True), "rounds": c.info.rounds} for c in cells]
    return frame(rows, ROUNDS_COLUMNS)


_POOL = frozenset({"rho", "capacity", "accept", "all"})


def _streams(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.info.kind == "stream"]


def _one_round(cell: StreamCell) -> bool:
    return (cell.info.agents, cell.info.rounds) == (3, 1)


def _varied(cells: Sequence[StreamCell], number: str) -> list[StreamCell]:
    """Cells of the models and lengths that were run with several values of ``number``."""
    values: dict[tuple[object, ...], set[int]] = {}
    for cell in cells:
        values.setdefault(_lengths(cell), set()).add(getattr(cell.info, number))
    return [cell for cell in cells if len(values[_lengths(cell)]) > 1]


def _lengths(cell: StreamCell) -> tuple[object, ...]:
    info = cell.info
    return cell.run.info.model, info.layout, info.shared_tokens, info.output_tokens, info.scale


def _row(cell: StreamCell, cells: Sequence[StreamCell], *, all_turns: bool) -> Row:
    whole = memory(cell, cells)
    shown = {name: whole[name] for column in HELD if (name := column.name) in whole}
    pool = [row.memory.pool_base + row.memory.pool_delta for row in cell.turns.values()]
    return {
        **names(cell),
        **times(cell, cells, all_turns=all_turns),
        **shown,
        "pool_bytes": max(pool, default=None),
        **reuse(cell),
    }
