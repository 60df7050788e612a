"""`repro serve`: the options; the work is in :mod:`repro.commands.serve_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.commands.options import (
    Contexts,
    DryRun,
    MemoryLimit,
    Methods,
    Model,
    Out,
    ProfileName,
    Resume,
    Scale,
    Set,
)


def serve(
    ctx: Contexts = None,
    qps: Annotated[
        str | None,
        typer.Option("--qps", help="Agent requests per second; 0 is a single stream: 0,0.5,8."),
    ] = None,
    methods: Methods = None,
    rho: Annotated[
        str | None,
        typer.Option("--rho", help="Reuse ratio of the delta methods: 0.8 or 0.8,0.6."),
    ] = None,
    arrival: Annotated[
        str | None,
        typer.Option("--arrival", help="even, workflow, poisson or azure; several with commas."),
    ] = None,
    arrival_times: Annotated[
        Path | None,
        typer.Option("--arrival-times", help="CSV with a column TIMESTAMP, for azure."),
    ] = None,
    mode: Annotated[
        Literal["real", "emulate"],
        typer.Option("--mode", help="Run the methods, or charge them as the public harness does."),
    ] = "real",
    engine: Annotated[Literal["vllm", "hf"] | None, typer.Option("--engine")] = None,
    model: Model = None,
    scale: Scale = None,
    outputs: Annotated[
        str | None, typer.Option("--outputs", help="Tokens each agent generates: 128,512,2048.")
    ] = None,
    long_outputs: Annotated[
        bool, typer.Option("--long-outputs", help="The same as --outputs 128,512,2048 (paper B.6).")
    ] = False,
    chained: Annotated[
        bool | None,
        typer.Option("--chained/--no-chained", help="Only this variant of KVCMAS."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Agent requests of a cell.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Cells of one load, other seeds.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="First seed of arrivals and schedules.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Serve a recorded trace instead of a generated one."),
    ] = None,
    gate: Annotated[
        Literal["controlled", "live"] | None,
        typer.Option("--gate", help="A schedule of dense transitions, or the methods' own gates."),
    ] = None,
    clock: Annotated[
        Literal["virtual", "wall"] | None,
        typer.Option("--clock", help="Skip idle time, or wait for it."),
    ] = None,
    decode: Annotated[
        bool | None,
        typer.Option("--decode", help="Decode the recorded outputs; else stop at the first token."),
    ] = None,
    time_scale: Annotated[
        str | None,
        typer.Option("--time-scale", help="auto, or seconds here per second of the paper's GPU."),
    ] = None,
    memory_limit: MemoryLimit = None,
    profile: ProfileName = "smoke",
    set_: Set = None,
    out: Out = Path("runs"),
    resume: Resume = True,
    dry_run: DryRun = False,
) -> None:
    """Serve a multi-agent trace under load with every method; print Tables 7, 9 and 10.

    QPS counts agent requests. Finished cells are kept; an interrupted one is run again.
    """
    from repro.commands.serve_run import Request, run

    run(
        Request(
            ctx=ctx,
            qps=qps,
            methods=methods,
            rho=rho,
            arrival=arrival,
            arrival_times=arrival_times,
            mode=mode,
            engine=engine,
            model=model,
            scale=scale,
            outputs="128,512,2048" if long_outputs else outputs,
            chained=chained,
            requests=requests,
            repeats=repeats,
            seed=seed,
            trace=trace,
            gate=gate,
            clock=clock,
            decode=decode,
            time_scale=time_scale,
            memory_limit=memory_limit,
            profile=profile,
            set=tuple(set_ or ()),
            out=out,
            resume=resume,
            dry_run=dry_run,
        )
    )
