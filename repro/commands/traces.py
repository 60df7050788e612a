"""`repro trace`: make serving traces, and look into trace files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcmas.errors import UserError
from repro.commands.console import output_console

if TYPE_CHECKING:
    from traces.schema import Trace, TraceTurn

app = typer.Typer(help="Make controlled serving traces and show trace files.", no_args_is_help=True)

# The paper's reuse ratios for delta correction under load (B.4).
RHOS = (0.8, 0.6)


@app.command("generate")
def generate_command(
    out: Annotated[Path, typer.Option("--out", help="The trace file to write.")],
    layout: Annotated[
        Literal["T", "L0"],
        typer.Option("--layout", help="T: the paper's trace; L0: the shared span, little else."),
    ] = "T",
    ctx: Annotated[
        str, typer.Option("--ctx", help="Tokens of the shared span: 2k, 8k, 32k or a number.")
    ] = "2k",
    workflows: Annotated[int, typer.Option("--workflows", help="User requests.")] = 17,
    agents: Annotated[int, typer.Option("--agents", help="Turns of a workflow.")] = 4,
    outputs: Annotated[
        int, typer.Option("--outputs", help="Tokens that each agent generates (128, 512, 2048).")
    ] = 128,
    scale: Annotated[
        float, typer.Option("--scale", help="Divide every length by this; kept in the header.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all token ids.")] = 0,
    vocab: Annotated[
        int | None, typer.Option("--vocab", help="Draw ids below this (instead of --model).")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Draw this model's ids, without its special tokens."),
    ] = None,
) -> None:
    """Draw a trace of random token ids, write it and print its path."""
    from traces.generator import GeneratorSettings, Seeds, write_generated

    if (vocab is None) == (model is None):
        raise UserError("give either --vocab or --model")
    notes = Console(stderr=True)
    ids, special, positions = (vocab or 0, frozenset[int](), None)
    if model is not None:
        from repro.models import resolve
        from repro.models.vocabulary import read_vocabulary

        known = read_vocabulary(resolve(model, console=notes).path)
        ids, special, positions = known.size, known.special, known.positions
    settings = GeneratorSettings(
        vocab=ids,
        layout=layout,
        shared=tokens_of(ctx),
        output=outputs,
        workflows=workflows,
        agents=agents,
        scale=scale,
        seeds=Seeds.all(seed),
        exclude=special,
    )
    if positions is not None and settings.positions > positions:
        raise UserError(
            f"{model} allows {positions} tokens, the last turn takes {settings.positions};"
            " choose a smaller --ctx or a larger --scale"
        )
    write_generated(out, settings)
    notes.print(f"{workflows} workflows, up to {settings.positions} tokens a turn")
    typer.echo(out)


@app.command("show")
def show_command(
    file: Annotated[Path, typer.Argument(help="A generated or recorded trace.")],
) -> None:
    """Show a trace's header, the lengths of its turns and its work bounds."""
    from traces.schema import read_trace

    trace = read_trace(file)
    console = output_console()
    _print_header(console, trace)
    if trace.workflows:
        console.print(_turns_table(trace))
        console.print(_bounds_table(trace))


def tokens_of(text: str) -> int:
    """``2k`` is 2048.

    Raises:
        UserError: no number of tokens.
    """
    number, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not (number.isascii() and number.isdigit()):
        raise UserError(f"--ctx {text!r} is no number of tokens; write 2k, 8k, 32k or 2048")
    return int(number) * factor


def _print_header(console: Console, trace: Trace) -> None:
    rows = trace.header.model_dump(exclude={"origin"}) | trace.header.origin
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, _short(value))
    console.print(table)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={inner}" for key, inner in value.items())
    if isinstance(value, list):
        return f"{len(value)} ids" if value else "none"
    return escape(str(value))


def _turns_table(trace: Trace) -> Table:
    """Tokens per turn of the static graph; mean and range where workflows differ."""
    from traces.bounds import pf_share

    table = Table(title="Tokens per turn", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("turn", "prompt", "agent-specific", "shared", "output", "f"):
        table.add_column(heading, justify="left" if heading == "turn" else "right")
    turns: dict[str, list[TraceTurn]] = {}
    for workflow in trace.workflows:
        for turn in workflow.turns:
            turns.setdefault(turn.node.name, []).append(turn)
    for node, same in turns.items():
        prompts = [len(turn.prompt) for turn in same]
        shared = [sum(len(s.ids) for s in turn.segments if s.slot) for turn in same]
        own = [prompt - held for prompt, held in zip(prompts, shared, strict=True)]
        outputs = [len(turn.output) for turn in same]
        f = sum(map(pf_share, same)) / len(same)
        table.add_row(node, *map(_spread, (prompts, own, shared, outputs)), f"{f:.3f}")
    return table


def _spread(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{sum(values) / len(values):.0f} ({low}-{high})"


def _bounds_table(trace: Trace) -> Table:
    """Work bounds by formula, and of the schedules that the serving harness offers."""
    from traces.bounds import later_pf_share, scheduled_work, work_bound
    from traces.schedule import controlled_schedule, even_hops, even_schedule, realised_rho

    workflows = trace.workflows
    hops = [len(workflow.turns) for workflow in workflows]
    f = later_pf_share(workflows)
    title = f"Work bounds, f = {f:.3f} in hops that can reuse"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    for heading in ("rho", "schedule", "rho by transition", "rho by token", "full hops", "bound"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for rho in RHOS:
        if len(set(hops)) == 1 and hops[0] > 1:
            bound = work_bound(hops[0], rho, f)
            table.add_row(f"{rho:g}", "formula", f"{rho:.3f}", "", "", f"{bound:.2f}")
        kinds = even_hops(hops, rho)
        full = f"{sum(kind != 'reused' for kind in kinds)}/{len(kinds)}"
        for name, schedule, count in (
            ("controlled", controlled_schedule(workflows, rho), ""),
            ("public harness", even_schedule(workflows, rho), full),
        ):
            real = realised_rho(schedule, workflows)
            work = scheduled_work(workflows, schedule)
            table.add_row(
                f"{rho:g}",
                name,
                f"{real.transitions:.3f}",
                f"{real.tokens:.3f}",
                count,
                f"{work.bound:.2f}",
            )
    return table
