"""`repro model`: the options; the work is in :mod:`repro.commands.model_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.commands.options import Methods, Out


def model(
    ctx: Annotated[
        str, typer.Option("--ctx", help="Tokens of the shared span: 2k,8k,32k or numbers.")
    ] = "2k,8k,32k",
    qps: Annotated[
        str, typer.Option("--qps", help="Agent requests per second; 0 is a single stream.")
    ] = "0,0.5,2,8",
    gpu: Annotated[str, typer.Option("--gpu", help="a100, h100, h200; several with commas.")] = (
        "a100"
    ),
    methods: Methods = None,
    rho: Annotated[str, typer.Option("--rho", help="Reuse ratio of the delta methods.")] = "0.8",
    arrival: Annotated[
        Literal["even", "workflow", "poisson"], typer.Option("--arrival", help="Arrival law.")
    ] = "even",
    outputs: Annotated[
        int, typer.Option("--outputs", min=1, help="Tokens that each agent generates.")
    ] = 128,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Agent requests of a cell.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="The same load with other seeds.")
    ] = None,
    schedule: Annotated[
        Literal["controlled", "even"],
        typer.Option("--schedule", help="Dense transitions; even: the public harness's."),
    ] = "controlled",
    step_rows: Annotated[
        int | None, typer.Option("--step-rows", min=1, help="Chunked prefill: rows of a step.")
    ] = None,
    validate: Annotated[
        Path | None,
        typer.Option("--validate", help="Instead compare with the served cells in this folder."),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Also write a run of each cell, for tables.")
    ] = False,
    out: Out = Path("runs/model"),
) -> None:
    """Model TTFT under load of Llama-3.1-8B on a GPU with every method; nothing is run."""
    from repro.commands.model_run import Request, check, run

    if validate is not None:
        check(validate, out, records=records)
        return
    run(
        Request(
            gpu=gpu,
            ctx=ctx,
            outputs=outputs,
            qps=qps,
            rho=rho,
            arrival=arrival,
            methods=methods,
            requests=requests,
            repeats=repeats,
            schedule=schedule,
            step_rows=step_rows,
            records=records,
            out=out,
        )
    )
