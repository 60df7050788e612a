"""What `repro serve` shows: the cells beforehand, a header, and a table that fills up."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table as RichTable

from repro.runners.serving.backend import Sketch
from repro.runners.serving.capacity import UTILISATION, paper_capacity
from repro.runners.serving.cells import Cell, Study
from repro.runners.serving.memory import needed_bytes
from repro.runners.serving.run import Setting
from results import stats
from results.records import Run

# A method executes what its work bound leaves and has costs of its own; the estimate is no bound.
_SLACK = 1.3


def header(study: Study, setting: Setting) -> list[str]:
    """What has to be known to read a number of this study."""
    workload, profile = study.workload, study.profile
    scaled = "lengths as in the paper" if workload.scale == 1 else f"lengths / {workload.scale:g}"
    served = "outputs decoded" if profile.decode else "requests end with their first token"
    lines = [
        f"layout {workload.layout}: {workload.shared} shared and {workload.output} output tokens,"
        f" {workload.agents} agents, {scaled}; n = {workload.requests} agent requests in"
        f" {len(workload.workflows)} workflows, {profile.repeats} repeats",
        f"engine {setting.backend.engine_name}, model {setting.model.name}"
        f"@{setting.model.revision[:10]}, {profile.clock} clock (captures left out), {served};"
        f" rho: {'schedule' if profile.gate == 'controlled' else 'live gates'};"
        f" pools: {len(workload.pool)} workflows",
        "QPS is agent requests per second; TTFT counts from the intended arrival",
    ]
    if study.capacity is not None:
        here, paper = study.capacity.requests_per_s, paper_capacity(workload.prompts)
        rates = sorted({qps for rates in profile.arrival.values() for qps in rates if qps})
        shown = ", ".join(
            f"{qps:g} QPS = {qps / study.time_scale:.3g}/s here"
            f" = {qps / study.time_scale / here:.3g}x"
            for qps in rates
        )
        lines.append(
            f"NonShared serves {here:.3g}/s here; Llama-3.1-8B on an A100 {paper:.3g}/s (formula,"
            f" {UTILISATION:.0%} of peak); time scale {study.time_scale:.3g}. {shown} of capacity"
        )
    return lines


def estimate_s(cell: Cell, earlier: Sequence[Run]) -> float:
    """Seconds that the cell's engine will be busy, from finished cells of its kind if there are.

    Else from NonShared's capacity and the work bound; NaN while the capacity is unknown.
    """
    workload = cell.study.workload
    for run in earlier:
        same = (run.info.method, run.info.label) == (cell.method, cell.label)
        if same and run.requests and run.info.data_sha256 == workload.sha256:
            alone = stats.mean([row.finished_s - row.started_s for row in run.requests])
            begin = min(row.arrival_s for row in run.requests)
            whole = max(row.finished_s for row in run.requests) - begin
            # Batched requests share the engine; at low rates the cell was idle in between.
            return workload.requests * min(alone, whole / len(run.requests))
    if cell.study.capacity is None:
        return math.nan
    work = workload.requests / cell.study.capacity.requests_per_s
    return work / (cell.bound or 1) * (_SLACK if cell.method != "nonshared" else 1)


def dry_run_table(cells: Sequence[Cell], sketch: Sketch, limit: int) -> RichTable:
    """Cells with what they need."""
    table = _table("method", "variant", "trace", "rho", "arrival", "QPS", "n", "bound", "GB", "min")
    for cell in cells:
        workload = cell.study.workload
        needed = needed_bytes(cell.build(), workload.workflows[0], sketch.spec, sketch.weight_bytes)
        minutes = estimate_s(cell, ()) / 60
        table.add_row(
            cell.method,
            cell.label,
            workload.name,
            f"{cell.rho:g}",
            cell.law,
            f"{cell.qps:g}",
            str(workload.requests),
            "" if cell.bound is None else f"{cell.bound:.2f}",
            f"{needed / 1e9:.2f}{' OOM' if needed > limit else ''}",
            "?" if math.isnan(minutes) else f"{minutes:.1f}",
        )
    return table


class CellTable:
    """A live table of cells on a terminal; one line per finished cell elsewhere."""

    def __init__(self, cells: Sequence[Cell], seconds: Sequence[float], console: Console) -> None:
        self._cells = cells
        self._console = console
        self._rows = {
            cell.key: [f"about {s:.0f} s", "", "", "", ""]
            for cell, s in zip(cells, seconds, strict=True)
        }
        self._started = 0.0
        self._step = ""
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._step = ""
            self._live.stop()

    def step(self, text: str) -> None:
        """What is being done now."""
        self._step = text
        if not self._console.is_terminal:
            self._console.print(text, style="dim", highlight=False)

    def start(self, cell: Cell) -> None:
        """A cell begins."""
        self._started = time.monotonic()
        self._rows[cell.key][0] = "running"

    def ended(self, cell: Cell, requests: int) -> None:
        """So many of its requests have ended."""
        self._rows[cell.key][0] = f"{requests}/{cell.study.workload.requests}"

    def finish(self, cell: Cell, run: Run, earlier: Sequence[Run]) -> None:
        """A cell is done, now or in an earlier run of the command."""
        row = self._rows[cell.key]
        row[:] = _summary(cell, run, earlier)
        if self._started:
            row[-1] = f"{time.monotonic() - self._started:.0f} s"
            self._started = 0.0
        if not self._console.is_terminal:
            load = f"{cell.study.workload.name}, {cell.law} {cell.qps:g} QPS, rho {cell.rho:g}"
            texts = zip(("", "p50 ", "x ", "bound ", ""), row, strict=True)
            shown = "  ".join(name + text for name, text in texts if text)
            self._console.print(f"{cell.name}: {load}: {shown}", highlight=False)

    def _render(self) -> RichTable:
        table = _table(
            *("method", "variant", "trace", "rho", "arrival", "QPS"),
            *("state", "p50 TTFT s", "vs NonShared", "bound", "took"),
        )
        for cell in self._cells:
            load = (cell.study.workload.name, f"{cell.rho:g}", cell.law, f"{cell.qps:g}")
            table.add_row(cell.method, cell.label, *load, *self._rows[cell.key])
        table.caption = self._step
        return table


def _summary(cell: Cell, run: Run, earlier: Sequence[Run]) -> list[str]:
    """State, median, speed-up over NonShared under the same load, bound, time taken."""
    if run.info.serve is not None and run.info.serve.out_of_memory:
        return [f"OOM: {run.info.serve.memory_needed_bytes / 1e9:.1f} GB", "", "", "", ""]
    median = stats.percentile([row.ttft_s for row in run.requests], 50)
    dense = next((other for other in earlier if _same_load(other, run)), None)
    ratio = ""
    if dense is not None:
        base = stats.percentile([row.ttft_s for row in dense.requests], 50)
        ratio = f"{base / median:.2f}"
    lost = f", {len(run.lost)} lost" if run.lost else ""
    bound = "" if cell.bound is None else f"{cell.bound:.2f}"
    return [f"{len(run.requests)} done{lost}", f"{median:.3f}", ratio, bound, ""]


def _same_load(other: Run, run: Run) -> bool:
    a, b = other.info.serve, run.info.serve
    return (
        a is not None
        and b is not None
        and other.info.method == "nonshared"
        and (a.arrival, a.qps, other.info.seed, other.info.data_sha256)
        == (b.arrival, b.qps, run.info.seed, run.info.data_sha256)
    )


def _table(*headings: str) -> RichTable:
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        left = heading in ("method", "variant", "trace", "arrival")
        table.add_column(heading, justify="left" if left else "right", no_wrap=left)
    return table
