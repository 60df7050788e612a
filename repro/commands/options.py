"""Options that several commands take, with one help text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Bench = Annotated[str, typer.Option("--bench", help="Benchmark, e.g. gsm8k.")]
Model = Annotated[
    str | None, typer.Option("--model", help="Registry name or a Transformers directory.")
]
ProfileName = Annotated[str, typer.Option("--profile", help="smoke, cpu or paper.")]
Data = Annotated[
    str | None,
    typer.Option("--data", envvar="REPRO_DATA", help="hub, procedural, or a directory or file."),
]
Out = Annotated[Path, typer.Option("--out", help="Where run directories and tables go.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value: a profile key, a method setting or method.setting."),
]
N = Annotated[int | None, typer.Option("--n", min=1, help="Number of samples.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", help="Recorded trace; recorded now if not given.")
]
Warm = Annotated[int | None, typer.Option("--warm", min=0, help="Workflows that fill the pools.")]
Held = Annotated[
    int | None, typer.Option("--calibration", min=0, help="Workflows set apart for calibration.")
]
