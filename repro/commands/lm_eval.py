"""`repro lm-eval`: the options; the work is in :mod:`repro.commands.lm_eval_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.commands.options import Data, Set


def lm_eval(
    tasks: Annotated[str, typer.Option("--tasks", help="Comma-separated task names of lm-eval.")],
    method: Annotated[str, typer.Option("--method", help="Registered name or module:Class.")] = (
        "kvcmas"
    ),
    model: Annotated[
        str, typer.Option("--model", help="Registry name or a Transformers directory.")
    ] = "smollm2-135m",
    agents: Annotated[
        str, typer.Option("--agents", help="any, gsm8k, mmlu or humaneval: whose roles work.")
    ] = "any",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Limit of every turn but the last.")
    ] = 64,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions per task.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option("--num-fewshot", min=0, help="Examples in the context.")
    ] = None,
    data: Data = None,
    include: Annotated[
        Path | None, typer.Option("--include-path", help="Folder with task files of your own.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write JSON here.")] = None,
    set_: Set = None,
) -> None:
    """Run tasks of lm-eval through the agents, under any method."""
    from repro.commands.lm_eval_run import Request, run

    run(
        Request(
            tasks=tasks,
            method=method,
            model=model,
            agents=agents,
            max_new_tokens=max_new_tokens,
            limit=limit,
            num_fewshot=num_fewshot,
            data=data,
            include=include,
            out=out,
            set=set_ or (),
        )
    )
