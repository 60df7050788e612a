"""Runs the analyses of `repro analyze`: rows to CSV, a short table, figures from the CSV."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pandas as pd
import typer
from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.engine.executor import Executor
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro import env
from repro.commands.console import INTERRUPTED, output_console, progress_bar
from repro.commands.options import Request
from repro.commands.recorded import Setting
from repro.commands.settings import parse_settings
from repro.runners.analysis_chain import Chain
from repro.runners.analysis_coverage import Coverage, mean_deviation
from repro.runners.analysis_ranks import rank_rows
from results.analysis import KINDS, Analysis, ChainRow, CoverageRow, RankRow
from results.analysis_summary import chain_summary, coverage_summary, rank_summary
from traces.schema import TraceWorkflow

# Reference and correction as columns of the printed table.
_VARIANTS = {
    ("source", "kvcmas"): "chained",
    ("context-free", "kvcmas"): "non-chained",
    ("source", "none"): "plain source",
    ("context-free", "none"): "plain context-free",
    ("chained - non-chained", "kvcmas"): "difference",
}
R = TypeVar("R", RankRow, ChainRow, CoverageRow)

RANK_NOTES = (
    "effective_rank: least rank that keeps 90% of the sum of squared singular values",
    "layer 0 of a delta is zero up to rounding and has no rank; relative_norm shows the rounding",
    *(f"kind {kind}: {text}" for kind, text in KINDS.items()),
    "where the query follows the system prompt at once, its deltas are pf_system deltas as well",
)
CHAIN_NOTES = (
    "error: Frobenius norm of served minus exact over that of exact, per segment and layer",
    "kvcmas: warm pool, every correction accepted; none: plain reuse, errors carried along",
    "comparable: segments that both references corrected",
)
COVERAGE_NOTES = (
    "selected entries are replaced by exact ones, nothing is executed (A.1)",
    "energy: squared relative Frobenius error summed over K, V, layers and segments; a random"
    " subset removes its own share of it",
    "norm: the relative Frobenius error itself, summed in the same way",
    "relative: coverage over that of random selection of the same unit at the same budget",
    "layer: highest mean deviation on calibration requests; deviation: values in layer 1;"
    " attention: received in the source turn over the segment's mean",
    "oracle: the largest true error; an upper bound for energy, ours, not in the paper",
)


def run_ranks(request: Request, *, figure: bool) -> None:
    """Write ranks.csv and its summary, print the summary, draw Figures 2 and 7."""
    setting, notes = _open(request)
    executor = Executor(setting.adapter)
    rows = _collect(
        setting,
        "ranks",
        lambda workflow: rank_rows(executor, workflow, setting.reference_prefix),
    )
    found = Analysis.of("ranks", RankRow, rows, _provenance(setting), RANK_NOTES)
    summary = rank_summary(found.frame)
    _show(
        "Effective rank (90% of the energy), mean over layers",
        summary[summary["slots"] == "all"],
        {
            "kind": "kind",
            "tensor": "of",
            "least_tokens": "tokens >=",
            "segments": "segments",
            "tokens": "median tokens",
            "width": "D",
            "effective_rank": "rank",
            "energy_r8": "energy at 8",
            "error_r32": "error at 32",
            "relative_norm": "norm/target",
        },
    )
    _write(request, notes, found, summary, ("figure2", "figure7") if figure else ())


def run_chain(request: Request, kvcmas: Sequence[str], *, figure: bool) -> None:
    """Write chain.csv and its summary, print the summary, draw Figure 3."""
    settings = parse_settings(kvcmas)
    make_method("kvcmas", settings)
    setting, notes = _open(request)
    trace = setting.replayed()
    warm = trace.workflows[: setting.fidelity.warm]
    with notes.status(f"filling the pools with {len(warm)} workflows"):
        chain = Chain(
            setting.adapter,
            trace.header.topology,
            warm,
            reference_prefix=setting.reference_prefix,
            settings=settings,
        )
    rows = _collect(setting, "chain", chain.rows)
    provenance = {
        **_provenance(setting),
        "warm": str(len(warm)),
        "kvcmas": " ".join(kvcmas) or "defaults",
    }
    found = Analysis.of("chain", ChainRow, rows, provenance, CHAIN_NOTES)
    summary = chain_summary(found.frame)
    _show(
        "Relative error against the exact cache, mean over layers",
        _by_variant(summary),
        {
            "scope": "agent",
            "tensor": "of",
            "segments": "segments",
            **{name: name for name in _VARIANTS.values()},
        },
    )
    _write(request, notes, found, summary, ("figure3",) if figure else ())


def run_coverage(request: Request, rhos: Sequence[float], draws: int, seed: int) -> None:
    """Write coverage.csv and its summary (Table 2), print the summary."""
    setting, notes = _open(request)
    executor = Executor(setting.adapter)
    parts = setting.fidelity
    held_out = setting.trace.workflows[parts.warm : parts.warm + parts.calibration]
    with notes.status(f"profiling layers on {len(held_out)} workflows"):
        deviation = mean_deviation(executor, held_out)
    criteria = Coverage(deviation, rhos, draws, seed)
    rows = _collect(setting, "coverage", lambda workflow: criteria.rows(executor, workflow))
    provenance = {
        **_provenance(setting),
        "calibration": str(len(held_out)),
        "draws": str(draws),
        "seed": str(seed),
    }
    found = Analysis.of("coverage", CoverageRow, rows, provenance, COVERAGE_NOTES)
    summary = coverage_summary(found.frame)
    _show(
        "Table 2: share of the reuse error that a selection removes",
        summary,
        {
            "unit": "unit",
            "criterion": "criterion",
            "rho": "rho",
            "budget": "budget",
            "coverage_energy": "coverage",
            "relative_energy": "relative",
            "coverage_norm": "of norms",
            "relative_norm": "relative",
        },
    )
    _write(request, notes, found, summary, ())


def _open(request: Request) -> tuple[Setting, Console]:
    """The setting, and where progress goes.

    Raises:
        UserError: a trace of a model with another vocabulary.
    """
    notes = Console(stderr=True)
    setting = Setting(request, notes)
    vocab, ours = setting.trace.header.vocab, setting.adapter.spec.vocab
    if vocab != ours:
        raise UserError(f"the trace has a vocabulary of {vocab} tokens, the model one of {ours}")
    return setting, notes


def _collect(
    setting: Setting, name: str, analyse: Callable[[TraceWorkflow], Iterable[R]]
) -> list[R]:
    """Rows of the evaluated workflows; warm-up and calibration ones are not among them."""
    workflows = setting.replayed().workflows[setting.fidelity.warm :]
    rows: list[R] = []
    with progress_bar(setting.notes) as progress:
        task = progress.add_task(f"{name}: workflows", total=len(workflows))
        try:
            for workflow in workflows:
                rows.extend(analyse(workflow))
                progress.advance(task)
        except KeyboardInterrupt:
            progress.stop()
            setting.notes.print("interrupted; nothing was written")
            raise typer.Exit(INTERRUPTED) from None
    return rows


def _provenance(setting: Setting) -> dict[str, str]:
    environment, origin = env.environment(), setting.trace.header.origin
    header, parts = setting.trace.header, setting.fidelity
    spec = setting.adapter.spec
    n = len(setting.replayed().workflows) - parts.warm
    return {
        "model": f"{setting.resolved.name}@{setting.resolved.revision}",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": f"{spec.device.type} ({env.hardware()})",
        "bench": str(origin.get("bench", header.kind)),
        "data": str(origin.get("data", "local")),
        "workflow": header.topology,
        "trace_sha256": header.sha256,
        "n": str(n),
        "torch": str(environment["packages"]["torch"]),
        "transformers": str(environment["packages"]["transformers"]),
        "git_commit": str(environment["git_commit"]),
        "command": shlex.join(["repro", *sys.argv[1:]]),
    }


def _write(
    request: Request,
    notes: Console,
    found: Analysis,
    summary: pd.DataFrame,
    figures: Sequence[str],
) -> None:
    csv = found.write(request.out)
    paths = [csv, found.derived("summary", summary).write(request.out)]
    for path in [*paths, *(_draw(csv, request.out, figures) if figures else ())]:
        notes.print(f"wrote {path}", style="dim")


def _draw(csv: Path, out: Path, figures: Sequence[str]) -> list[Path]:
    from plots import analysis  # matplotlib is slow to load

    draw = {
        "figure2": analysis.figure2,
        "figure3": analysis.figure3,
        "figure7": analysis.figure7,
    }
    return [path for name in figures for path in draw[name]([csv], out)]


def _by_variant(summary: pd.DataFrame) -> pd.DataFrame:
    """One row per agent and tensor, one column per variant; plain reuse without its bounds."""
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for _, found in summary.iterrows():
        names = {"scope": found["scope"], "tensor": found["tensor"], "segments": found["segments"]}
        row = rows.setdefault((found["scope"], found["tensor"]), names)
        name = _VARIANTS[found["reference"], found["correction"]]
        for suffix in ("", "_low", "_high") if found["correction"] == "kvcmas" else ("",):
            row[name + suffix] = found["error" + suffix]
    return pd.DataFrame(list(rows.values()))


def _show(title: str, frame: pd.DataFrame, headings: dict[str, str]) -> None:
    """Print some columns of a summary; a column with bounds beside it gets its interval."""
    table = RichTable(title=title, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name, heading in headings.items():
        text = f"{heading} [95%]" if f"{name}_low" in frame else heading
        numeric = name in frame and pd.api.types.is_numeric_dtype(frame[name])
        table.add_column(text, justify="right" if numeric else "left")
    for _, row in frame.iterrows():
        table.add_row(*(_cell(row, name) for name in headings))
    output_console().print(table)


def _cell(row: pd.Series, name: str) -> str:
    value = row[name]
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return ""
    text = f"{value:.3g}"
    if f"{name}_low" in row and not pd.isna(row[f"{name}_low"]):
        text += f" [{row[f'{name}_low']:.3g}, {row[f'{name}_high']:.3g}]"
    return text
