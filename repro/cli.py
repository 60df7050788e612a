"""The command line. Bad input ends in one clear line and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from kvcmas.errors import UserError
from repro.commands.analyze import app as analyze_app
from repro.commands.options import (
    Bench,
    Data,
    Held,
    Model,
    N,
    Out,
    ProfileName,
    Request,
    Set,
    Warm,
    takes_request,
)
from repro.commands.serve import serve
from repro.commands.traces import app as traces_app
from repro.models.cli import app as models_app

app = typer.Typer(
    help="Reproduction suite for KVCMAS (arXiv 2609.34060).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(
    help="Measure what the parts cost, as ratios in one run.", no_args_is_help=True
)
app.add_typer(traces_app, name="trace")
app.add_typer(models_app, name="models")
app.add_typer(analyze_app, name="analyze")
app.add_typer(bench_app, name="bench")
app.command()(serve)

Methods = Annotated[str | None, typer.Option("--methods", help="Comma-separated method names.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Order of the samples.")]
Orders = Annotated[
    int | None,
    typer.Option("--orders", min=1, help="Orders of the samples, for methods that learn."),
]
Rho = Annotated[
    float | None,
    typer.Option("--rho", min=0, max=1, help="Calibrate every method with a budget for this."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the cells with an upper bound of their time; stop.")
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


@app.command()
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
    profile: ProfileName = "smoke",
    data: Data = None,
    cell: Cells = None,
    study: Study = None,
    out: Out = Path("runs"),
    set_: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Run a multi-agent benchmark under several methods and print Table 1.

    An interrupted run goes on where it stopped when the same command is given again.
    """
    from repro.commands import accuracy as command

    command.run(
        command.Request(
            bench=bench,
            methods=methods,
            model=model,
            n=n,
            seed=seed,
            orders=orders,
            warm=warm,
            calibration=calibration,
            rho=rho,
            profile=profile,
            data=data,
            cells=cell or (),
            study=study,
            out=out,
            set=set_ or (),
            dry_run=dry_run,
        )
    )


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


@app.command()
def table(
    number: Annotated[str, typer.Argument(help="Number of the paper's table.")],
    runs: Annotated[Path, typer.Option("--runs", help="Directory with run directories.")] = Path(
        "runs"
    ),
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write CSV, Parquet, Markdown and LaTeX here.")
    ] = None,
) -> None:
    """Make a table of the paper from records only."""
    from repro.commands.tables import show_table

    show_table(number, runs, out)


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


@app.command()
def figure(
    number: Annotated[str, typer.Argument(help="Number of the paper's figure.")],
    runs: Annotated[Path, typer.Option("--runs", help="Directory with run directories.")] = Path(
        "runs"
    ),
    out: Annotated[Path, typer.Option("--out", help="Where PNG, SVG and PDF go.")] = Path(
        "runs/figures"
    ),
) -> None:
    """Draw a figure of the paper from records only."""
    from repro.commands.figures import show_figure

    show_figure(number, runs, out)


@app.command()
def model(
    ctx: Annotated[
        str, typer.Option("--ctx", help="Tokens of the shared span: 2k,8k,32k or numbers.")
    ] = "2k,8k,32k",
    qps: Annotated[
        str, typer.Option("--qps", help="Agent requests per second; 0 is a single stream.")
    ] = "0,0.5,2,8",
    gpu: Annotated[str, typer.Option("--gpu", help="a100, h100, h200; several with commas.")] = (
        "a100"
    ),
    methods: Methods = None,
    rho: Annotated[str, typer.Option("--rho", help="Reuse ratio of the delta methods.")] = "0.8",
    arrival: Annotated[
        Literal["even", "workflow", "poisson"], typer.Option("--arrival", help="Arrival law.")
    ] = "even",
    outputs: Annotated[
        int, typer.Option("--outputs", min=1, help="Tokens that each agent generates.")
    ] = 128,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Agent requests of a cell.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="The same load with other seeds.")
    ] = None,
    schedule: Annotated[
        Literal["controlled", "even"],
        typer.Option("--schedule", help="Dense transitions; even: the public harness's."),
    ] = "controlled",
    step_rows: Annotated[
        int | None, typer.Option("--step-rows", min=1, help="Chunked prefill: rows of a step.")
    ] = None,
    validate: Annotated[
        Path | None,
        typer.Option("--validate", help="Instead compare with the served cells in this folder."),
    ] = None,
    out: Out = Path("runs/model"),
) -> None:
    """Model TTFT under load of Llama-3.1-8B on a GPU with every method; nothing is run."""
    from repro.commands import model as command

    if validate is not None:
        command.check(validate, out)
        return
    command.run(
        command.Request(
            gpu=gpu,
            ctx=ctx,
            outputs=outputs,
            qps=qps,
            rho=rho,
            arrival=arrival,
            methods=methods,
            requests=requests,
            repeats=repeats,
            schedule=schedule,
            step_rows=step_rows,
            out=out,
        )
    )


@app.command("lm-eval")
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
    from repro.commands import lm_eval as command

    command.run(
        command.Request(
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


PartTokens = Annotated[
    int | None, typer.Option(min=0, help="Tokens of this part of a prompt, if not the layout's.")
]


@app.command()
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
) -> None:
    """Calculate bytes by category for any configuration; nothing is run or downloaded."""
    from repro.commands import memory as command

    if claims:
        if len(_given(context)) > 1:
            raise UserError("--claims has the paper's settings and takes no other option")
        command.run_claims()
        return
    parts = {"system": system, "private": private, "glue": glue, "tail": tail}
    command.run(
        command.Request(
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


@app.command()
def claims(
    runs: Annotated[Path, typer.Option("--runs", help="Directory with run directories.")] = Path(
        "runs"
    ),
) -> None:
    """Show the claim ledger: every checkable claim of the paper and its verdict here."""
    from repro.commands.tables import show_claims

    show_claims(runs)


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


@bench_app.command("executor")
def bench_executor(
    model: Annotated[
        str, typer.Option("--model", help="Registry name or directory.")
    ] = "smollm2-135m",
    shared: Annotated[
        int, typer.Option("--shared", min=1, help="Tokens of the shared span.")
    ] = 2048,
    anchors: Annotated[int, typer.Option("--anchors", min=1, help="Anchors in the pool.")] = 10,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed rounds.")] = 5,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", help="Write every repeat as JSON here.")
    ] = None,
) -> None:
    """Time the executor against Transformers, and one turn of each kind (layout L0)."""
    from repro.commands.bench import run_executor

    run_executor(model, shared, anchors, repeats, device, out)


def _given(context: typer.Context) -> list[str]:
    """Names of the options that the command line holds."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


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
