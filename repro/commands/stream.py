"""`repro stream`: the options; the work is in :mod:`repro.commands.stream_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from repro.commands.options import (
    Cells,
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


def stream(
    part: Annotated[
        str | None,
        typer.Option("--part", help="Parts of the profile, e.g. context,agents; all if not given."),
    ] = None,
    study: Annotated[
        str | None,
        typer.Option("--study", help="Cells of a study, e.g. ranks, at the profile's longest ctx."),
    ] = None,
    ctx: Contexts = None,
    methods: Methods = None,
    rho: Annotated[
        str | None, typer.Option("--rho", help="Reuse ratios of the methods that have one: 0.8,0.6")
    ] = None,
    agents: Annotated[str | None, typer.Option("--agents", help="Turns of a round: 2,4,8.")] = None,
    rounds: Annotated[str | None, typer.Option("--rounds", help="Rounds: 1,2,4,8.")] = None,
    model: Model = None,
    load: Annotated[
        Literal["weights", "dummy"] | None,
        typer.Option("--load", help="dummy: random weights of the model's published shape."),
    ] = None,
    layout: Annotated[
        Literal["T", "L0"] | None,
        typer.Option("--layout", help="T: the paper's trace; L0: the shared span, little else."),
    ] = None,
    scale: Scale = None,
    outputs: Annotated[
        int | None, typer.Option("--outputs", min=1, help="Tokens that each agent generates.")
    ] = None,
    workflows: Annotated[
        int | None, typer.Option("--workflows", min=1, help="Measured workflows of a cell.")
    ] = None,
    cell: Cells = None,
    memory_limit: MemoryLimit = None,
    profile: ProfileName = "smoke",
    set_: Set = None,
    out: Out = Path("runs"),
    resume: Resume = True,
    dry_run: DryRun = False,
) -> None:
    """Measure what one request stream costs under every method; print Tables 11 to 15.

    Finished cells are kept; an interrupted one goes on after its last finished workflow.
    """
    from repro.commands.stream_run import Request, run

    run(
        Request(
            parts=part,
            study=study,
            ctx=ctx,
            methods=methods,
            rho=rho,
            agents=agents,
            rounds=rounds,
            model=model,
            load=load,
            layout=layout,
            scale=scale,
            outputs=outputs,
            workflows=workflows,
            cells=tuple(cell or ()),
            memory_limit=memory_limit,
            profile=profile,
            set=tuple(set_ or ()),
            out=out,
            resume=resume,
            dry_run=dry_run,
        )
    )
