"""`repro bench` of everything that runs in this process: ratios beside their goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.errors import UserError
from repro.commands.console import output_console
from repro.commands.settings import choose_device
from repro.env import environment, hardware
from repro.models import load, resolve
from repro.runners.bench_connector import bench_connector
from repro.runners.bench_correction import FITTED_LAYERS, WIDE_LAYERS, bench_correction
from repro.runners.bench_executor import bench_executor
from repro.runners.bench_kvcomm import GLUE, LAYOUTS, POOL, SYSTEM, TAIL, bench_kvcomm
from repro.runners.bench_parts import AFTER, BEFORE, Step
from repro.runners.bench_turn import bench_anchors, bench_turn
from results.goals import HEADINGS, BenchRecord, BenchRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 8192


@dataclass(frozen=True)
class Setting:
    """What every bench is told; ``out`` is the file of its record."""

    model: str
    repeats: int
    device: str
    out: Path | None


def run_executor(setting: Setting, shared: int, anchors: int) -> None:
    """The executor beside Transformers, and one turn of each kind.

    Raises:
        UserError: a model or context that does not fit, or a file that cannot be written.
    """
    model, _ = _load(setting)
    rows = _measure(
        lambda on_step: bench_executor(
            model, shared=shared, anchors=anchors, repeats=setting.repeats, on_step=on_step
        )
    )
    _finish("executor", _layout(setting, shared, anchors), rows, (), setting)


def run_correction(setting: Setting, shared: int | None, anchors: int, wide_shared: int) -> None:
    """One segment's correction beside its dense prefill.

    Raises:
        UserError: as :func:`run_executor`.
    """
    model, _ = _load(setting)
    tokens = _fitting(model, shared)
    rows = _measure(
        lambda on_step: bench_correction(
            model,
            shared=tokens,
            anchors=anchors,
            wide_shared=wide_shared,
            repeats=setting.repeats,
            on_step=on_step,
        )
    )
    notes = [
        "correction: gate, weights, correction, rotation and write of one segment",
        f"exponents: of 4 sizes of S, 3 of V and of r, {FITTED_LAYERS} layers of the model's shape",
    ]
    if wide_shared:
        notes.append(f"D=1024: {WIDE_LAYERS} layers of Llama-3.1-8B's shape with random weights")
    _finish("correction", _layout(setting, tokens, anchors), rows, notes, setting)


def run_anchors(setting: Setting, shared: int | None) -> None:
    """Anchor building beside the dense prefill that it follows.

    Raises:
        UserError: as :func:`run_executor`.
    """
    model, _ = _load(setting)
    tokens = _fitting(model, shared)
    rows = _measure(
        lambda on_step: bench_anchors(
            model, shared=tokens, repeats=setting.repeats, on_step=on_step
        )
    )
    notes = ["one anchor: base and delta of K and V, rank 32"]
    _finish("anchors", _layout(setting, tokens, 1), rows, notes, setting)


def run_turn(setting: Setting, contexts: Sequence[int], anchors: int) -> None:
    """An accepted turn beside NonShared's and FullShared's.

    Raises:
        UserError: as :func:`run_executor`.
    """
    model, _ = _load(setting)
    rows = _measure(
        lambda on_step: bench_turn(
            model, contexts=contexts, anchors=anchors, repeats=setting.repeats, on_step=on_step
        )
    )
    title = f"{setting.model}, layout T, last of three agents, {anchors} anchors: TTFT"
    _finish("turn", title, rows, ["every gate compares all anchors and accepts"], setting)


def run_kvcomm(setting: Setting, name: str, shared: int | None, requests: int) -> None:
    """Whole trajectories beside the official KVComm's numbers, which only its layouts have.

    Raises:
        UserError: as :func:`run_executor`.
    """
    model, tokenizer = _load(setting)
    layout = LAYOUTS[name]
    if shared is not None:
        layout = replace(layout, shared=shared, goal=None, small_goal=None)
    rows = _measure(
        lambda on_step: bench_kvcomm(
            model, tokenizer, layout, requests=requests, repeats=setting.repeats, on_step=on_step
        )
    )
    notes = [
        f"{SYSTEM} system tokens cached for both, {GLUE} before each output, {TAIL} at the end",
        "first turn dense on both sides; gate, weights and correction of all turns count; tau=1",
    ]
    if requests:
        notes.append(f"first tokens: word problems of our own, pool filled by {POOL} requests")
    title = f"{setting.model}, {layout.shared} shared tokens, {layout.agents} agents"
    _finish("kvcomm", title, rows, notes, setting)


def run_connector(setting: Setting, shared: int) -> None:
    """NonShared through the vLLM plug-in beside stock vLLM; a repeat is a request.

    Raises:
        UserError: as :func:`run_executor`, or vLLM is missing.
    """
    model = resolve(setting.model, console=Console(stderr=True))
    rows = _measure(
        lambda on_step: bench_connector(
            model.path, shared=shared, requests=setting.repeats, on_step=on_step
        )
    )
    title = f"{setting.model}, layout T with {shared} shared tokens, vLLM: TTFT / stock vLLM's"
    notes = ["one engine and process each; every request is served by all three in changing order"]
    _finish("connector", title, rows, notes, setting)


def _layout(setting: Setting, shared: int, anchors: int) -> str:
    pool = f"{anchors} anchor{'s' if anchors > 1 else ''}"
    return f"{setting.model}, layout L0: {BEFORE} + {shared} shared + {AFTER} tokens, {pool}"


def _load(setting: Setting) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    resolved = resolve(setting.model, console=Console(stderr=True))
    return load(resolved, device=choose_device(setting.device))


def _fitting(model: PreTrainedModel, shared: int | None) -> int:
    room = TransformersAdapter(model).spec.max_positions - BEFORE - AFTER
    return min(LONGEST, room) if shared is None else shared


def _measure(bench: Callable[[Step], tuple[BenchRow, ...]]) -> tuple[BenchRow, ...]:
    with Console(stderr=True).status("starting") as status:
        return bench(status.update)


def _finish(
    bench: str, title: str, rows: tuple[BenchRow, ...], notes: Sequence[str], setting: Setting
) -> None:
    """Print the table and, if asked, write the record."""
    made_on = f"{hardware()}; rounds interleaved, the first discarded; medians of paired ratios"
    record = BenchRecord(
        bench=bench, title=title, rows=rows, notes=(*notes, made_on), environment=environment()
    )
    console = output_console()
    table = RichTable(title=title, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        table.add_row(*row.cells)
    console.print(table)
    for note in record.notes:
        console.print(note, style="dim", highlight=False)
    if setting.out is not None:
        try:
            setting.out.parent.mkdir(parents=True, exist_ok=True)
            setting.out.write_text(record.model_dump_json(indent=2), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {setting.out}: {error.strerror}") from error
