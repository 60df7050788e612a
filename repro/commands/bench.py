"""`repro bench`: the options; the work is in :mod:`repro.commands.bench_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.commands.traces import tokens_of

app = typer.Typer(help="Measure what the parts cost, as ratios in one run.", no_args_is_help=True)

Small = Annotated[str, typer.Option("--model", help="Registry name or directory.")]
Fitting = Annotated[
    int | None,
    typer.Option("--shared", min=1, help="Tokens of the shared span [8192, or what fits]."),
]
Anchors = Annotated[int, typer.Option("--anchors", min=2, help="Anchors in the pool.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Timed rounds.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Record = Annotated[Path | None, typer.Option("--out", help="Write every repeat as JSON here.")]


@app.command("executor")
def executor_command(
    model: Small = "smollm2-135m",
    shared: Annotated[
        int, typer.Option("--shared", min=1, help="Tokens of the shared span.")
    ] = 2048,
    anchors: Annotated[int, typer.Option("--anchors", min=1, help="Anchors in the pool.")] = 10,
    repeats: Repeats = 5,
    device: Device = "auto",
    out: Record = None,
) -> None:
    """Time the executor against Transformers, and one turn of each kind (layout L0)."""
    from repro.commands.bench_run import Setting, run_executor

    run_executor(Setting(model, repeats, device, out), shared, anchors)


@app.command("connector")
def connector_command(
    model: Small = "smollm2-135m",
    shared: Annotated[
        int, typer.Option("--shared", min=1, help="Tokens of the shared span.")
    ] = 2048,
    requests: Annotated[int, typer.Option("--requests", min=2, help="Paired requests.")] = 36,
    out: Record = None,
) -> None:
    """Time NonShared through the vLLM connector against stock vLLM, with an A/A control."""
    from repro.commands.bench_run import Setting, run_connector

    run_connector(Setting(model, requests, "auto", out), shared)


@app.command("correction")
def correction_command(
    model: Small = "smollm2-135m",
    shared: Fitting = None,
    anchors: Anchors = 10,
    wide_shared: Annotated[
        int,
        typer.Option("--wide-shared", min=0, help="Tokens at Llama-3.1-8B's width; 0: none."),
    ] = 1024,
    repeats: Repeats = 3,
    device: Device = "auto",
    out: Record = None,
) -> None:
    """Time a segment's correction against its dense prefill (layout L0), and how it grows."""
    from repro.commands.bench_run import Setting, run_correction

    run_correction(Setting(model, repeats, device, out), shared, anchors, wide_shared)


@app.command("anchors")
def anchors_command(
    model: Small = "smollm2-135m",
    shared: Fitting = None,
    repeats: Repeats = 3,
    device: Device = "auto",
    out: Record = None,
) -> None:
    """Time the building of an anchor against the dense prefill before it (layout L0)."""
    from repro.commands.bench_run import Setting, run_anchors

    run_anchors(Setting(model, repeats, device, out), shared)


@app.command("turn")
def turn_command(
    model: Small = "bench-llama",
    ctx: Annotated[
        str, typer.Option("--ctx", help="Tokens of the shared span: 2k,8k,32k or numbers.")
    ] = "2k,8k",
    anchors: Anchors = 10,
    repeats: Repeats = 3,
    device: Device = "auto",
    out: Record = None,
) -> None:
    """Time an accepted KVCMAS turn against NonShared and FullShared (layout T)."""
    from repro.commands.bench_run import Setting, run_turn

    contexts = [tokens_of(part.strip()) for part in ctx.split(",")]
    run_turn(Setting(model, repeats, device, out), contexts, anchors)


@app.command("kvcomm")
def kvcomm_command(
    layout: Annotated[
        Literal["1k", "2k", "4k"],
        typer.Option("--layout", help="1k: 4 agents, 128 tokens out; 2k and 4k: 3 agents, 32."),
    ] = "1k",
    model: Small = "smollm2-135m",
    shared: Annotated[
        int | None, typer.Option("--shared", min=1, help="Tokens of the span, if not the layout's.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", min=0, help="Also compare first tokens on so many.")
    ] = 0,
    repeats: Repeats = 3,
    device: Device = "auto",
    out: Record = None,
) -> None:
    """Time whole trajectories on layouts on which the official KVComm was measured."""
    from repro.commands.bench_run import Setting, run_kvcomm

    run_kvcomm(Setting(model, repeats, device, out), layout, shared, requests)
