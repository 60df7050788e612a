"""Where an engine's time goes under a backlog, and how much of the work bound is reached.

A work bound counts prompt tokens. What a method adds to them (its plan, rows filled from caches,
anchors) and tokens that cost more than the mean one keep it from its bound; here is how many
seconds each of them takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd

from results import stats
from results.names import display_name
from results.records import Run
from results.serving import EXACT, ServedCell, served_cells
from results.tables import Column, provenance, register

# From this multiple of NonShared's capacity on an engine has a backlog nearly all the time.
BACKLOG: Final = 2.0

COLUMNS = (
    Column("bench", "Trace", "string"),
    Column("arrival", "Arrivals", "string"),
    Column("qps", "QPS", digits=2),
    Column("method", "Method", "string"),
    Column("variant", "Variant", "string", hide_if_empty=True),
    Column("n", "n", "Int64"),
    Column("request_s", "Engine s / request", digits=3),
    Column("speedup", "Speed-up", digits=2),
    Column("work_bound", "Work bound", digits=2),
    Column("reached_percent", "Reached %", digits=0),
    Column("ideal_s", "At the bound s", digits=3),
    Column("plan_s", "Plan s", digits=3),
    Column("inject_s", "Fill s", digits=3),
    Column("execute_s", "Rows by the plug-in s", digits=3),
    Column("build_s", "Anchors s", digits=3),
    Column("engine_s", "Rows by the engine s", digits=3),
)


def _request_seconds(cell: ServedCell) -> float:
    """Seconds per answered request, from the first arrival to the end of the last request."""
    spans = [
        max(row.finished_s for row in run.requests) - min(row.arrival_s for row in run.requests)
        for run in cell.runs
        if run.requests
    ]
    return sum(spans) / len(cell.requests)


def _rows(runs: Sequence[Run]) -> list[dict[str, object]]:
    cells = [cell for cell in served_cells(runs) if _backlogged(cell)]
    dense = {cell.key.load: cell for cell in cells if cell.key.method == EXACT}
    return [
        _row(cell, dense[cell.key.load], cell.serve.work_bound)
        for cell in cells
        if cell.key.load in dense and cell.serve.work_bound is not None
    ]


def _backlogged(cell: ServedCell) -> bool:
    serve = cell.serve
    return bool(cell.requests) and serve.qps_here >= BACKLOG * serve.capacity


def _row(cell: ServedCell, dense: ServedCell, bound: float) -> dict[str, object]:
    own, exact = _request_seconds(cell), _request_seconds(dense)
    parts = {
        name: stats.mean([row.times_s.get(name, 0.0) for row in cell.requests.values()])
        for name in ("background", "plan", "inject", "execute", "again", "build")
    }
    executed = parts["execute"] + parts["again"] - parts["inject"]
    planned = parts["background"] + parts["plan"]
    known = planned + parts["inject"] + executed + parts["build"]
    return {
        "bench": cell.key.load.bench,
        "arrival": cell.key.load.arrival,
        "qps": cell.key.load.qps,
        "method": display_name(cell.key.method),
        "variant": cell.key.label,
        "n": len(cell.requests),
        "request_s": own,
        "speedup": exact / own,
        "work_bound": bound,
        "reached_percent": 100 * exact / own / bound,
        "ideal_s": exact / bound,
        "plan_s": planned,
        "inject_s": parts["inject"],
        "execute_s": executed,
        "build_s": parts["build"],
        "engine_s": own - known,
    }


def _footer(runs: Sequence[Run]) -> tuple[str, ...]:
    return (
        f"cells whose rate is at least {BACKLOG:g} times NonShared's capacity; engine seconds from"
        " the first arrival to the end of the last request",
        "plan: gates and weights, references where a method needs them; fill: deltas, rotation and"
        " writing; anchors come after the first token; at the bound: NonShared's seconds over it",
        *provenance(runs),
    )


@register(
    "7-time",
    title="Where the engine's time goes under a backlog",
    columns=COLUMNS,
    kinds=("serve",),
    command="repro serve --ctx CTX --qps 8",
    footer=_footer,
)
def _table(runs: Sequence[Run]) -> pd.DataFrame:
    return pd.DataFrame(_rows(runs), columns=[name for c in COLUMNS for name in c.frame_names])
