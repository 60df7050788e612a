"""`repro bench`: the options; the work is in :mod:`repro.commands.bench_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Measure what the parts cost, as ratios in one run.", no_args_is_help=True)


@app.command("executor")
def executor_command(
    model: Annotated[
        str, typer.Option("--model", help="Registry name or directory.")
    ] = "smollm2-135m",
    shared: Annotated[
        int, typer.Option("--shared", min=1, help="Tokens of the shared span.")
    ] = 2048,
    anchors: Annotated[int, typer.Option("--anchors", min=1, help="Anchors in the pool.")] = 10,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed rounds.")] = 5,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every repeat as JSON here.")
    ] = None,
) -> None:
    """Time the executor against Transformers, and one turn of each kind (layout L0)."""
    from repro.commands.bench_run import run_executor

    run_executor(model, shared, anchors, repeats, device, out)


@app.command("connector")
def connector_command(
    model: Annotated[
        str, typer.Option("--model", help="Registry name or directory.")
    ] = "smollm2-135m",
    shared: Annotated[
        int, typer.Option("--shared", min=1, help="Tokens of the shared span.")
    ] = 2048,
    requests: Annotated[int, typer.Option("--requests", min=2, help="Paired requests.")] = 36,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every pair as JSON here.")
    ] = None,
) -> None:
    """Time NonShared through the vLLM connector against stock vLLM, with an A/A control."""
    from repro.commands.bench_connector import run_connector

    run_connector(model, shared, requests, out)
