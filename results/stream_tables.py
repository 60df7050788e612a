"""Tables 11 and 12: memory, TTFT and throughput of a single stream by context (paper C.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from results import stats
from results.names import display_name
from results.records import Run
from results.stats import Estimate
from results.stream import (
    BOOTSTRAP_SEED,
    StreamCell,
    dense_of,
    info_of,
    ratio,
    stream_cells,
    usual,
)
from results.tables import Column, provenance, register

COMMAND = "repro stream --profile cpu"
Row = dict[str, object]

NAMES = (
    Column("bench", "Shape", "string"),
    Column("method", "Method", "string"),
    Column("variant", "Variant", "string", hide_if_empty=True),
    Column("state", "Not run", "string", hide_if_empty=True),
)
MEMORY = (
    Column("held_bytes", "Held GB", "Int64", digits=3, scale=1e-9),
    Column("held_ratio", "Held / KVCMAS", digits=2),
    Column("weights_bytes", "Weights GB", "Int64", digits=3, scale=1e-9),
    Column("active_bytes", "Active KV MB", "Int64", digits=1, scale=1e-6),
    Column("sources_bytes", "Sources MB", "Int64", digits=1, scale=1e-6),
    Column("pool_base_bytes", "Pool base MB", "Int64", digits=1, scale=1e-6),
    Column("pool_delta_bytes", "Pool delta MB", "Int64", digits=1, scale=1e-6),
    Column("references_bytes", "References MB", "Int64", digits=1, scale=1e-6),
    Column("transient_bytes", "One anchor in the making MB", "Int64", digits=1, scale=1e-6),
    Column("needed_bytes", "Calculated GB", "Int64", digits=3, scale=1e-9),
    Column("limit_bytes", "Limit GB", "Int64", digits=1, scale=1e-9),
    Column("resident_bytes", "Peak RSS GB", "Int64", digits=3, scale=1e-9, hide_if_empty=True),
    Column("allocated_bytes", "Allocated GB", "Int64", digits=3, scale=1e-9, hide_if_empty=True),
    Column("reserved_bytes", "Reserved GB", "Int64", digits=3, scale=1e-9, hide_if_empty=True),
    Column("driver_bytes", "Driver GB", "Int64", digits=3, scale=1e-9, hide_if_empty=True),
)
TIME = (
    Column("n", "n", "Int64"),
    Column("ttft_s", "TTFT s [95% CI]", digits=3, interval=True),
    Column("speedup", "TTFT speed-up [95% CI]", digits=2, interval=True),
    Column("work_bound", "Work bound", digits=2),
    Column("tokens_per_s", "Trajectory tokens/s [95% CI]", digits=1, interval=True),
    Column("generated_per_s", "Generated tokens/s", digits=2),
    Column("e2e_s", "Trajectory s", digits=2),
    Column("build_s", "Anchors s", digits=3),
    Column("decode_s", "Decoding s", digits=2),
)
REUSE = (
    Column("rho_set", "rho set", digits=2),
    Column("rho_entry", "rho entry", digits=3),
    Column("rho_transition", "rho transition", digits=3),
)
WORK = (
    Column("gflop", "GFLOP", digits=2, scale=1e-9),
    Column("moved_bytes", "Moved MB", digits=1, scale=1e-6),
    Column("flop_share", "Explained by FLOPs", digits=2),
    Column("byte_share", "Explained by bytes", digits=2),
    Column("roofline_share", "Explained by the slower", digits=2),
)


def header(runs: Sequence[Run]) -> tuple[str, ...]:
    """What the stream was."""
    infos = [info_of(run) for run in runs]

    def values(name: str) -> str:
        return ", ".join(sorted({f"{getattr(info, name)}" for info in infos}))

    stretched = {run.info.model for run in runs if beyond_context(run)}
    lines = [
        f"Single stream, layout {values('layout')}, lengths divided by {values('scale')},"
        f" agents {values('agents')}, rounds {values('rounds')}, {values('load')} of"
        f" {', '.join(sorted({run.info.model for run in runs}))}."
    ]
    if stretched:
        lines.append(
            f"Contexts beyond the model's own (cost only): {', '.join(sorted(stretched))}."
        )
    return tuple(lines)


def beyond_context(run: Run) -> bool:
    """Whether its contexts are longer than the model was made for."""
    info = info_of(run)
    return info.positions > info.model_positions


def footer(runs: Sequence[Run]) -> tuple[str, ...]:
    """How the numbers came about, and provenance."""
    warm = sum(info_of(run).warm_up_requests for run in runs)
    rates = {
        f"{r.flops_per_s / 1e9:.1f} GFLOP/s, {r.bytes_per_s / 1e9:.1f} GB/s"
        for run in runs
        if (r := info_of(run).rates) is not None
    }
    lines = [
        "ids are random, outputs are fed token by token; rho by a schedule of dense transitions or"
        " by budget; every workflow starts with full pools, copies of one workflow's anchors",
        "speed-ups over NonShared on the same turns; intervals: bootstrap over workflows, seed"
        f" {BOOTSTRAP_SEED}; {warm} agent requests ran before and were discarded",
        "trajectory tokens: all prompts and outputs of a workflow, over the sum of its turns'"
        " end-to-end times",
        f"machine in the same runs: {'; '.join(sorted(rates)) or 'not measured'} (a product of the"
        " model's size, a copy of one layer's K and V)",
    ]
    own = [line for line in provenance(runs) if not line.startswith("data=procedural")]
    return (*lines, *own)


def names(cell: StreamCell) -> Row:
    """Which cell a row is about."""
    return {
        "bench": cell.run.info.bench,
        "method": display_name(cell.method),
        "variant": cell.label,
        "state": "OOM" if cell.info.out_of_memory else "",
    }


def reuse(cell: StreamCell) -> Row:
    """Reuse ratios, asked for and realised."""
    rows = list(cell.turns.values())
    return {
        "rho_set": cell.info.rho,
        "rho_entry": stats.rho(rows, "entry"),
        "rho_transition": stats.rho(rows, "transition"),
    }


def times(cell: StreamCell, cells: Sequence[StreamCell], *, all_turns: bool) -> Row:
    """TTFT over the reuse requests, or over all, and throughput."""
    turns, dense = list(cell.turns.values()), dense_of(cell, cells)
    speed_up = _nothing() if dense is None else ratio(dense, cell, all_turns=all_turns)
    workflows = len({row.sample_id for row in turns})
    return {
        "n": len(cell.turns if all_turns else cell.later),
        **estimate("ttft_s", cell.ttft(all_turns=all_turns)),
        **estimate("speedup", speed_up),
        "work_bound": cell.info.work_bound,
        **estimate("tokens_per_s", cell.throughput()),
        "generated_per_s": cell.generated().value,
        "e2e_s": _per(workflows, sum(row.e2e_s for row in turns)),
        "build_s": _per(workflows, sum(row.times_s["build"] for row in turns)),
        "decode_s": _per(workflows, sum(row.times_s["decode"] for row in turns)),
    }


def work(cell: StreamCell) -> Row:
    """Mean work of a reuse request, and how much of its time that explains."""
    flops, moved, slower = cell.shares()
    rows = list(cell.later.values())
    return {
        "gflop": stats.mean([sum(w.flops for w in row.work) for row in rows]),
        "moved_bytes": stats.mean([sum(w.moved_bytes for w in row.work) for row in rows]),
        "flop_share": flops,
        "byte_share": moved,
        "roofline_share": slower,
    }


def memory(cell: StreamCell, cells: Sequence[StreamCell]) -> Row:
    """Bytes by category when most were held, and the system's peaks over all turns."""
    info, rows = cell.info, list(cell.turns.values())
    most = max(rows, key=lambda row: row.memory.held, default=None)
    peaks = {
        f"{name}_bytes": max((v for row in rows if (v := getattr(row.peak, name))), default=None)
        for name in ("resident", "allocated", "reserved", "driver")
    }
    parts = ("weights", "active", "sources", "pool_base", "pool_delta", "references", "transient")
    return {
        "held_bytes": cell.held_bytes,
        "held_ratio": _held_ratio(cell, cells),
        **{f"{name}_bytes": most and getattr(most.memory, name) for name in parts},
        "needed_bytes": info.memory_needed_bytes,
        "limit_bytes": info.memory_limit_bytes,
        **peaks,
    }


def estimate(name: str, value: Estimate) -> Row:
    """Cells of a column with an interval."""
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}


def frame(rows: Sequence[Row], columns: Sequence[Column]) -> pd.DataFrame:
    """Rows as the table's frame."""
    return pd.DataFrame(rows, columns=[name for c in columns for name in c.frame_names])


def _held_ratio(cell: StreamCell, cells: Sequence[StreamCell]) -> float | None:
    """Held over KVCMAS's; where nothing was run, both as calculated."""
    own = [c for c in cells if c.method == "kvcmas" and c.shape == cell.shape]
    if not own:
        return None
    if cell.held_bytes is None or own[0].held_bytes is None:
        return cell.info.memory_needed_bytes / own[0].info.memory_needed_bytes
    return cell.held_bytes / own[0].held_bytes


def selected(
    describe: Callable[[Sequence[Run]], tuple[str, ...]],
    choose: Callable[[Sequence[Run]], list[StreamCell]],
    command: str,
) -> Callable[[Sequence[Run]], tuple[str, ...]]:
    """Header or footer over a table's own runs; which command makes them where there are none."""

    def over(runs: Sequence[Run]) -> tuple[str, ...]:
        chosen = [cell.run for cell in choose(runs)]
        return describe(chosen) if chosen else (f"no records yet; made by: {command}",)

    return over


def _nothing() -> Estimate:
    return Estimate(*[float("nan")] * 3)


def _per(count: int, total: float) -> float | None:
    return total / count if count else None


def _by_context(runs: Sequence[Run]) -> list[StreamCell]:
    """Cells of the paper's C.1: three agents, one round, no ablation."""
    cells = usual(stream_cells(runs))
    return [cell for cell in cells if (cell.info.agents, cell.info.rounds) == (3, 1)]


MEMORY_COLUMNS = (*NAMES, *MEMORY, *REUSE)
TIME_COLUMNS = (*NAMES, *TIME, *REUSE, *WORK)


@register(
    "11",
    title="Memory of a single stream",
    columns=MEMORY_COLUMNS,
    kinds=("stream",),
    command=COMMAND,
    footer=selected(footer, _by_context, COMMAND),
    header=selected(header, _by_context, COMMAND),
)
def memory_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per shape, method and reuse ratio."""
    cells = _by_context(runs)
    rows = [{**names(cell), **memory(cell, cells), **reuse(cell)} for cell in cells]
    return frame(rows, MEMORY_COLUMNS)


@register(
    "12",
    title="TTFT of reuse requests and throughput of a single stream",
    columns=TIME_COLUMNS,
    kinds=("stream",),
    command=COMMAND,
    footer=selected(footer, _by_context, COMMAND),
    header=selected(header, _by_context, COMMAND),
)
def time_table(runs: Sequence[Run]) -> pd.DataFrame:
    """The same rows: TTFT is the mean over all but the first turn of a workflow."""
    cells = _by_context(runs)
    rows = [
        {**names(cell), **times(cell, cells, all_turns=False), **reuse(cell), **work(cell)}
        for cell in cells
    ]
    return frame(rows, TIME_COLUMNS)
