"""`repro memory`: the options; the work is in :mod:`repro.commands.memory_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvcmas.errors import UserError
from repro.commands.options import Set

PartTokens = Annotated[
    int | None, typer.Option(min=0, help="Tokens of this part of a prompt, if not the layout's.")
]


def memory(
    context: typer.Context,
    model: Annotated[
        str, typer.Option("--model", help="Registry name or directory; nothing is downloaded.")
    ] = "llama-3.1-8b",
    method: Annotated[
        str, typer.Option("--method", help="Comma-separated method names.")
    ] = "kvcmas,kvcomm",
    ctx: Annotated[
        str, typer.Option("--ctx", help="Tokens of the shared span: 2k, 8k, 32k or a number.")
    ] = "32k",
    layout: Annotated[
        Literal["T", "L0"],
        typer.Option("--layout", help="T: the paper's trace; L0: the shared span, little else."),
    ] = "T",
    agents: Annotated[int, typer.Option("--agents", min=1, help="Turns of a round.")] = 3,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of a workflow.")] = 1,
    outputs: Annotated[
        int, typer.Option("--outputs", min=1, help="Tokens that each agent generates.")
    ] = 128,
    system: PartTokens = None,
    private: PartTokens = None,
    glue: PartTokens = None,
    tail: PartTokens = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Of weights and caches; auto is the stored one."),
    ] = "auto",
    set_: Set = None,
    claims: Annotated[
        bool,
        typer.Option("--claims", help="C08 to C13 and C35 instead, in the paper's settings."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="With --claims: leave a record that repro claims judges."),
    ] = None,
) -> None:
    """Calculate bytes by category for any configuration; nothing is run or downloaded."""
    from repro.commands.memory_run import Request, run, run_claims

    if claims:
        if set(_given(context)) - {"claims", "out"}:
            raise UserError("--claims has the paper's settings and takes no option but --out")
        run_claims(out)
        return
    if out is not None:
        raise UserError("--out leaves a record of --claims; there is none of other calculations")
    parts = {"system": system, "private": private, "glue": glue, "tail": tail}
    run(
        Request(
            model=model,
            methods=method,
            ctx=ctx,
            layout=layout,
            agents=agents,
            rounds=rounds,
            outputs=outputs,
            lengths={name: tokens for name, tokens in parts.items() if tokens is not None},
            dtype=dtype,
            set=tuple(set_ or ()),
        )
    )


def _given(context: typer.Context) -> list[str]:
    """Names of the options that the command line holds."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
