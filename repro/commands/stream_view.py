"""What `repro stream` shows: the cells beforehand, what holds for all, a line per finished cell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from rich.table import Table as RichTable

from repro.runners.estimate import Speed, measure
from repro.runners.serving.capacity import prefill_flops
from repro.runners.stream.cells import Cell
from results import stats
from results.records import Run

# Attention is slower than the products that the machine's rate is measured with.
_EFFICIENCY = 0.6
# Launching a layer's operations for one token takes about this long, however small they are (s).
_LAUNCH = 4e-4


class Estimate:
    """About how long cells take on this machine, from their FLOPs and work bounds."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._speed = cache(self._measured)

    def seconds(self, cell: Cell) -> float:
        """The measured workflows of a cell, and the discarded one."""
        spec, workload = cell.stage.model.sketch.spec, cell.stage.workload
        speed = self._speed(spec.dtype)
        turns = cell.stage.longest.turns
        flops = sum(prefill_flops(spec, len(turn.prompt)) for turn in turns)
        prefill = flops / (cell.bound or 1) / (speed.flops * _EFFICIENCY)
        token = cell.stage.model.sketch.weight_bytes / speed.bytes + spec.layers * _LAUNCH
        decode = sum(len(turn.output) for turn in turns) * token
        return (prefill + decode) * (len(workload.workflows) + 1)

    def _measured(self, dtype: torch.dtype) -> Speed:
        return measure(dtype, self._device)


def header(cells: Sequence[Cell]) -> list[str]:
    """What has to be known to read a number."""
    stages = list(dict.fromkeys(cell.stage.name for cell in cells))
    first = cells[0].stage
    stretched = sorted(
        {
            f"{cell.stage.model.name} ({cell.stage.model.sketch.spec.max_positions})"
            for cell in cells
            if cell.stage.workload.positions > cell.stage.model.sketch.spec.max_positions
        }
    )
    lines = [
        f"layout {first.layout}; {len(cells)} cells on {len(stages)} shapes: {'; '.join(stages)}",
        "token ids are random and outputs are fed token by token; every workflow starts with full"
        " pools, copies of one workflow's anchors; its first turn is dense, then reuse is set by"
        " schedule or budget; one workflow per shape and method is run before and discarded",
    ]
    if stretched:
        lines.append(f"contexts are longer than these models' own: {', '.join(stretched)}")
    return lines


def dry_run_table(cells: Sequence[Cell], estimate: Estimate, limit: int) -> RichTable:
    """Cells with what they need and about how long they take."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("method", "variant", "model", "shape"):
        table.add_column(heading, overflow="fold")
    for heading in ("n", "bound", "GB", "min"):
        table.add_column(heading, justify="right")
    total = 0.0
    for cell in cells:
        fits = cell.needed_bytes <= limit
        minutes = estimate.seconds(cell) / 60 if fits else 0.0
        total += minutes
        table.add_row(
            cell.method,
            cell.label,
            cell.stage.model.name,
            cell.stage.name,
            str(len(cell.stage.workload.workflows)),
            "" if cell.bound is None else f"{cell.bound:.2f}",
            f"{cell.needed_bytes / 1e9:.2f}{'' if fits else ' OOM'}",
            f"{minutes:.1f}" if fits else "-",
        )
    table.caption = f"{len(cells)} cells, about {total:.0f} min here"
    return table


def finished_line(cell: Cell, run: Run) -> str:
    """What a cell came to."""
    name = f"{cell.name}: {cell.stage.name} on {cell.stage.model.name}:"
    info = run.info.stream
    if info is not None and info.out_of_memory:
        return f"{name} OOM, needs {info.memory_needed_bytes / 1e9:.2f} GB"
    later = [row.ttft_s for row in run.streamed if row.turn_index > 0]
    rho = stats.rho(run.streamed, "entry")
    held = max(row.memory.held for row in run.streamed) / 1e9
    return f"{name} TTFT of reuse turns {stats.mean(later):.3f} s, rho {rho:.3f}, {held:.2f} GB"
