"""`repro analyze`: what shared caches and their deltas look like, on a recorded trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.commands.options import (
    Bench,
    Data,
    Held,
    Model,
    N,
    Out,
    ProfileName,
    Set,
    Trace,
    Warm,
)

app = typer.Typer(
    help="Analyse the caches of a recorded trace; write CSV and, if asked, figures.",
    no_args_is_help=True,
)

Figure = Annotated[
    bool, typer.Option("--figure", help="Also draw the figures from the CSV (PNG, SVG, PDF).")
]


@app.command()
def ranks(
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
    figure: Figure = False,
) -> None:
    """Effective ranks of source caches, deltas and PF-induced deltas (Figures 2 and 7)."""
    from repro.commands.analyze_run import run_ranks
    from repro.commands.fidelity import Request

    run_ranks(
        Request(bench, model, profile, data, trace, n, warm, calibration, set_ or [], [], out),
        figure=figure,
    )


@app.command()
def chain(
    bench: Bench = "gsm8k",
    model: Model = None,
    n: N = None,
    warm: Warm = None,
    calibration: Held = None,
    profile: ProfileName = "smoke",
    data: Data = None,
    trace: Trace = None,
    set_: Set = None,
    kvcmas: Annotated[
        list[str] | None,
        typer.Option("--kvcmas", help="key=value: a setting of KVCMAS; repeatable."),
    ] = None,
    out: Out = Path("runs"),
    figure: Figure = False,
) -> None:
    """Error of chained against non-chained correction, by layer and agent (Figure 3)."""
    from repro.commands.analyze_run import run_chain
    from repro.commands.fidelity import Request

    run_chain(
        Request(bench, model, profile, data, trace, n, warm, calibration, set_ or [], [], out),
        kvcmas or [],
        figure=figure,
    )


@app.command()
def coverage(
    bench: Bench = "gsm8k",
    model: Model = None,
    n: N = None,
    warm: Warm = None,
    calibration: Held = None,
    profile: ProfileName = "smoke",
    data: Data = None,
    trace: Trace = None,
    set_: Set = None,
    rho: Annotated[
        list[float] | None,
        typer.Option("--rho", min=0, max=1, help="Reuse ratio; repeatable [0.9 and 0.8]."),
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Random selections per turn.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the random selections.")] = 0,
    out: Out = Path("runs"),
) -> None:
    """Reuse error that layer, deviation and attention selection remove (Table 2)."""
    from repro.commands.analyze_run import run_coverage
    from repro.commands.fidelity import Request

    run_coverage(
        Request(bench, model, profile, data, trace, n, warm, calibration, set_ or [], [], out),
        rho or [0.9, 0.8],
        draws,
        seed,
    )
