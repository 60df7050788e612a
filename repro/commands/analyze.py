"""`repro analyze`: what shared caches and their deltas look like, on a recorded trace."""

from __future__ import annotations

from typing import Annotated

import typer

from repro.commands.options import Request, takes_request

app = typer.Typer(
    help="Analyse the caches of a recorded trace; write CSV and, if asked, figures.",
    no_args_is_help=True,
)

Figure = Annotated[
    bool, typer.Option("--figure", help="Also draw the figures from the CSV (PNG, SVG, PDF).")
]


@app.command()
@takes_request
def ranks(request: Request, figure: Figure = False) -> None:
    """Effective ranks of source caches, deltas and PF-induced deltas (Figures 2 and 7)."""
    from repro.commands.analyze_run import run_ranks

    run_ranks(request, figure=figure)


@app.command()
@takes_request
def chain(
    request: Request,
    kvcmas: Annotated[
        list[str] | None,
        typer.Option("--kvcmas", help="key=value: a setting of KVCMAS; repeatable."),
    ] = None,
    figure: Figure = False,
) -> None:
    """Error of chained against non-chained correction, by layer and agent (Figure 3)."""
    from repro.commands.analyze_run import run_chain

    run_chain(request, kvcmas or [], figure=figure)


@app.command()
@takes_request
def coverage(
    request: Request,
    rho: Annotated[
        list[float] | None,
        typer.Option("--rho", min=0, max=1, help="Reuse ratio; repeatable [0.9 and 0.8]."),
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Random selections per turn.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="Of the random selections.")] = 0,
) -> None:
    """Reuse error that layer, deviation and attention selection remove (Table 2)."""
    from repro.commands.analyze_run import run_coverage

    run_coverage(request, rho or [0.9, 0.8], draws, seed)


@app.command()
@takes_request
def estimators(request: Request) -> None:
    """What the correction's parts are worth: weights, temperature, reference and rank crossed."""
    from repro.commands.fidelity import run_fidelity

    run_fidelity(request, study="estimators")
