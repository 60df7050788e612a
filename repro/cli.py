"""The command line. Bad input ends in one clear line and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from kvcmas.errors import UserError
from repro.commands.accuracy import accuracy
from repro.commands.analyze import app as analyze_app
from repro.commands.bench import app as bench_app
from repro.commands.claims import claims
from repro.commands.everything import everything
from repro.commands.lm_eval import lm_eval
from repro.commands.memory import memory
from repro.commands.model import model
from repro.commands.options import Cells, Request, Study, takes_request
from repro.commands.reference import reference
from repro.commands.report import report
from repro.commands.serve import serve
from repro.commands.stream import stream
from repro.commands.table import figure, table
from repro.commands.traces import app as traces_app
from repro.models.cli import app as models_app

app = typer.Typer(
    help="Reproduction suite for KVCMAS (arXiv 2609.34060).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(traces_app, name="trace")
app.add_typer(models_app, name="models")
app.add_typer(analyze_app, name="analyze")
app.add_typer(bench_app, name="bench")
app.command()(serve)
app.command()(stream)
app.command()(accuracy)

TargetRho = Annotated[float, typer.Option("--target-rho", help="Reuse ratio to hold.")]
Rule = Annotated[
    Literal["search", "deviation"] | None,
    typer.Option("--rule", help="How a profile chooses layers; the method's own if not given."),
]


@app.command()
@takes_request
def record(request: Request) -> None:
    """Record NonShared trajectories as a trace file and print its path."""
    from repro.commands.recorded import run_record

    run_record(request)


@app.command()
@takes_request
def profile(
    request: Request,
    method: Annotated[str, typer.Argument(help="droidspeak, relaycaching or graphflow.")],
    target_rho: TargetRho = 0.8,
    rule: Rule = None,
) -> None:
    """Run a method's offline phase, store what it found and print it."""
    from repro.commands.calibrate import run_profile

    run_profile(request, method, target_rho, rule)


@app.command()
@takes_request
def calibrate(
    request: Request,
    target_rho: TargetRho = 0.8,
    methods: Annotated[str, typer.Option("--methods", help="Comma-separated.")] = "kvcmas",
    rule: Rule = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Also the reuse ratio over the whole range (Table 6).")
    ] = False,
) -> None:
    """Find each method's threshold or budget for a reuse ratio, on requests set apart."""
    from repro.commands.calibrate import run_calibrate

    run_calibrate(request, methods, target_rho, rule=rule, curve=curve)


@app.command()
@takes_request
def fidelity(request: Request, cell: Cells = None, study: Study = None) -> None:
    """Replay identical recorded ids under every method; compare caches and answers with dense."""
    from repro.commands.fidelity import run_fidelity

    run_fidelity(request, cell or [], study)


# Here, so that the help lists the commands in the order of work.
app.command()(table)


@app.command()
def pack(
    runs: Annotated[Path, typer.Argument(help="Directory with run directories.")],
    into: Annotated[Path, typer.Argument(help="Where the packed runs go.")],
) -> None:
    """Pack finished runs small enough to commit; they are read like any run."""
    from repro.commands.documents import run_pack

    run_pack(runs, into)


@app.command()
def docs(
    documents: Annotated[
        list[Path] | None, typer.Argument(help="Markdown files or folders [README.md and docs].")
    ] = None,
    records: Annotated[Path, typer.Option("--records", help="Folder of packed runs.")] = Path(
        "results/reference"
    ),
    check: Annotated[bool, typer.Option("--check", help="Change nothing, fail if stale.")] = False,
) -> None:
    """Make the tables and numbers in documents again from the records."""
    from repro.commands.documents import run_docs

    run_docs(documents or [Path("README.md"), Path("docs")], records, check=check)


app.command()(figure)
app.command()(model)
app.command("lm-eval")(lm_eval)
app.command()(memory)
app.command()(claims)
app.command()(report)
app.command("all")(everything)
app.command()(reference)


@app.command()
def methods() -> None:
    """List the methods and their settings with defaults."""
    from repro.commands.tables import show_methods

    show_methods()


@app.command()
def env() -> None:
    """Print the environment record that every run stores, as JSON."""
    import json

    from repro.env import environment

    typer.echo(json.dumps(environment(), indent=2))


def main() -> None:
    """Entry point of ``repro``."""
    from results.errors import ResultsError

    try:
        app()
    except (UserError, ResultsError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_plain(str(error))}", soft_wrap=True)
        sys.exit(2)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))
