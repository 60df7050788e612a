"""`repro accuracy`: the options; the work is in :mod:`repro.commands.accuracy_run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from repro.commands.options import (
    Bench,
    Cells,
    Data,
    Held,
    Methods,
    Model,
    N,
    Out,
    ProfileName,
    Set,
    Study,
    Warm,
)

Seed = Annotated[int | None, typer.Option("--seed", help="Order of the samples.")]
Orders = Annotated[
    int | None,
    typer.Option("--orders", min=1, help="Orders of the samples, for methods that learn."),
]
Rho = Annotated[
    float | None,
    typer.Option("--rho", min=0, max=1, help="Calibrate every method with a budget for this."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit", min=0, help="Minutes after which no further sample begins; 0: no limit."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the cells with an upper bound of their time; stop.")
]


def accuracy(
    bench: Bench,
    methods: Methods = None,
    model: Model = None,
    n: N = None,
    seed: Seed = None,
    orders: Orders = None,
    warm: Warm = None,
    calibration: Held = None,
    rho: Rho = None,
    time_limit: TimeLimit = None,
    profile: ProfileName = "smoke",
    data: Data = None,
    cell: Cells = None,
    study: Study = None,
    out: Out = Path("runs"),
    set_: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Run a multi-agent benchmark under several methods and print Table 1.

    A run that was interrupted or reached its time limit goes on where it stopped when the same
    command is given again.
    """
    from repro.commands.accuracy_run import Request, run

    run(
        Request(
            bench=bench,
            methods=methods,
            model=model,
            n=n,
            seed=seed,
            orders=orders,
            warm=warm,
            calibration=calibration,
            rho=rho,
            time_limit=time_limit,
            profile=profile,
            data=data,
            cells=cell or (),
            study=study,
            out=out,
            set=set_ or (),
            dry_run=dry_run,
        )
    )
