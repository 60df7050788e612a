"""`repro memory`: bytes by category without running anything, and the paper's beside ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcmas.engine.contract import Method
from kvcmas.registry import make_method
from repro.commands.console import output_console
from repro.commands.settings import parse_settings
from repro.commands.traces import tokens_of
from repro.models.loading import DType
from repro.models.published import Figures, figures
from repro.runners.cells import apply_settings, choose_cells
from repro.runners.memory_claims import Row, memory_findings
from repro.runners.memory_model import (
    MemoryBytes,
    TurnShape,
    layout_graph,
    layout_turns,
    memory_bytes,
)
from repro.runners.memory_record import write_findings
from traces.generator import GeneratorSettings, LayoutName, Lengths


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        methods: comma-separated names.
        ctx: tokens of the shared span, as ``32k``.
        lengths: tokens of ``system``, ``private``, ``glue`` and ``tail`` that differ from the
            layout's.
    """

    model: str
    methods: str
    ctx: str
    layout: LayoutName
    agents: int
    rounds: int
    outputs: int
    lengths: Mapping[str, int]
    dtype: DType
    set: tuple[str, ...]


def run(request: Request) -> None:
    """Print the table of one configuration and what was assumed.

    Raises:
        UserError: an unknown model, method or setting, or one whose bytes are not counted.
    """
    cells = choose_cells((), [name.strip() for name in request.methods.split(",")])
    cells = apply_settings(cells, parse_settings(request.set))
    methods = [make_method(cell.method, cell.settings) for cell in cells]
    whole = GeneratorSettings(
        vocab=1, layout=request.layout, shared=tokens_of(request.ctx), output=request.outputs
    )
    lengths = replace(whole.lengths, **request.lengths)
    turns = layout_turns(lengths, layout_graph(request.layout, request.agents, request.rounds))
    model = figures(request.model, request.dtype)
    found = [memory_bytes(method, turns, model.spec, model.weight_bytes) for method in methods]
    console = output_console()
    console.print(_table([method.name for method in methods], found))
    _print_lines(console, _assumptions(request, model, lengths, turns, methods))


def run_claims(out: Path | None = None) -> None:
    """Print C08 to C13 and C35 beside the paper's numbers, with what was assumed for each.

    Args:
        out: leave a record below this folder.
    """
    console, findings = output_console(), memory_findings()
    if out is not None:
        directory = write_findings(findings, out)
        Console(stderr=True).print(f"the record is in {directory}")
    for finding in findings:
        table = _grid("claim", "quantity", "paper", "ours", "gap", "verdict", texts=2)
        for row in finding.rows:
            table.add_row(row.claim, escape(row.quantity), *_numbers(row))
        console.print(table)
        _print_lines(console, finding.assumptions)
    _print_lines(
        console,
        (
            "ours: weights, the longest turn's buffer, source caches or references of one workflow"
            " and full pools, by formula; activations, workspace and fragmentation are not counted",
            "verdicts follow the ledger's rules; a reading counts something else and is not judged",
        ),
    )


def _table(names: Sequence[str], found: Sequence[MemoryBytes]) -> Table:
    table = _grid("bytes", *names, texts=1)
    rows = (
        ("weights", [m.weights for m in found]),
        ("active KV", [m.active for m in found]),
        ("source caches", [m.sources for m in found]),
        ("pool: base", [m.pool.base for m in found]),
        ("pool: delta", [m.pool.delta for m in found]),
        ("references", [m.references for m in found]),
        ("held", [m.held for m in found]),
        ("transient: one anchor", [m.transient for m in found]),
        ("all together", [m.total for m in found]),
    )
    for heading, values in rows:
        style = "bold" if heading in ("held", "all together") else ""
        table.add_row(heading, *(f"{value:,}" for value in values), style=style)
    for heading, totals in (
        ("held, GB", [m.held for m in found]),
        ("all together, GB", [m.total for m in found]),
    ):
        table.add_row(heading, *(f"{value / 1e9:,.2f}" for value in totals))
    return table


def _assumptions(
    request: Request,
    model: Figures,
    lengths: Lengths,
    turns: Sequence[TurnShape],
    methods: Sequence[Method],
) -> list[str]:
    spec = model.spec
    longest = max(turn.rows for turn in turns)
    beyond = f", more than the model's {spec.max_positions}" * (longest > spec.max_positions)
    lines = [
        f"model: {model.name}, {model.parameters:,} parameters, {model.origin};"
        f" weights and caches in {str(spec.dtype).removeprefix('torch.')}",
        f"KV: {spec.layers} layers x {spec.kv_heads} heads x {spec.head_dim},"
        f" {spec.kv_bytes_per_token:,} bytes per token",
        f"layout {request.layout}: agents {request.agents}, rounds {request.rounds}; tokens:"
        f" system {lengths.system}, shared {lengths.shared}, private {lengths.private},"
        f" glue {lengths.glue} per output, tail {lengths.tail}, output {lengths.output};"
        f" longest turn {longest:,}{beyond}",
        "active KV: buffer of the longest turn; source caches, references: one workflow at a time",
        "pool: full, every anchor as long as these segments and holding all edges; layer 0 has no"
        " delta; GraphFlow: one mean per relation in fp32, before calibration ends",
        "transient: rotating and factorising one dense segment after the first token, without"
        " LAPACK's workspace",
        "all together: an upper bound, because categories need not peak in the same turn",
        "not counted: activations, attention workspace, the allocator's fragmentation, vision"
        " features",
    ]
    for method in methods:
        settings = " ".join(f"{key}={value}" for key, value in method.settings().items())
        lines.append(f"{method.name}: {settings}")
    return lines


def _numbers(row: Row) -> tuple[str, str, str, str]:
    paper = "" if row.paper is None else f"{row.paper:.2f} {row.unit}"
    paper = f"> {paper}" if row.relation == "above" else paper
    gap = row.gap
    shown = "" if gap is None or not row.paper else f"{gap:+.2f} ({gap / row.paper:+.1%})"
    verdict = row.verdict or ("reading" if row.relation == "reading" else "")
    return paper, f"{row.ours:.2f} {row.unit}", shown, verdict


def _grid(*headings: str, texts: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position < texts else "right")
    return table


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(f"- {line}", style="dim", highlight=False, markup=False)
    console.print()
