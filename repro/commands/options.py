"""Options that several commands take, with one help text each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

Bench = Annotated[str, typer.Option("--bench", help="Benchmark, e.g. gsm8k.")]
Model = Annotated[
    str | None, typer.Option("--model", help="Registry name or a Transformers directory.")
]
ProfileName = Annotated[str, typer.Option("--profile", help="smoke, cpu or paper.")]
Data = Annotated[
    str | None,
    typer.Option(
        "--data", envvar="REPRO_DATA", help="hub, package, procedural, or a directory or file."
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Where run directories and tables go.")]
Runs = Annotated[Path, typer.Option("--runs", help="Folder with runs and analyses.")]
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
Methods = Annotated[str | None, typer.Option("--methods", help="Comma-separated method names.")]
Contexts = Annotated[
    str | None, typer.Option("--ctx", help="Tokens of the shared span: 2k,8k,32k or numbers.")
]
Scale = Annotated[float | None, typer.Option("--scale", help="Divide every length by this.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option("--memory-limit", help="A cell that needs more is OOM: 80GB, 16GiB."),
]
Resume = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Keep finished cells, or run all again.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the cells with their time and memory; stop.")
]
Study = Annotated[
    str | None,
    typer.Option("--study", help="A named set of cells, e.g. estimators."),
]
Cells = Annotated[
    list[str] | None,
    typer.Option(
        "--cell",
        help="'METHOD key=value ...', also rho=0.8, rule=search, accept_all=true; repeatable.",
    ),
]


@dataclass(frozen=True)
class Request:
    """What commands on recorded trajectories share; None means the profile decides."""

    bench: str
    model: str | None
    n: int | None
    warm: int | None
    calibration: int | None
    profile: str
    data: str | None
    trace: Path | None
    set: tuple[str, ...]
    out: Path


def _request(
    bench: Bench = "gsm8k",
    model: Model = None,
    n: N = None,
    warm: Warm = None,
    calibration: Held = None,
    profile: ProfileName = "smoke",
    data: Data = None,
    trace: Trace = None,
    set_: Set = None,
    out: Out = Path("runs"),
) -> Request:
    return Request(bench, model, n, warm, calibration, profile, data, trace, tuple(set_ or ()), out)


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of :class:`Request` in place of its ``request`` parameter."""
    shared = inspect.signature(_request, eval_str=True).parameters
    own = inspect.signature(command, eval_str=True).parameters

    def run(**options: Any) -> None:
        request = _request(**{name: options.pop(name) for name in shared})
        command(request=request, **options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    parameters = [*shared.values(), *(p for name, p in own.items() if name != "request")]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    run.__annotations__ = {}
    return run
