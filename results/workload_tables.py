"""Tables 3, 4 and 5: how benchmarks were set up, how long trajectories are, what orders change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pandas as pd

from results import stats
from results.accuracy import Cell, gated, grouped, scores
from results.benches import BENCHES, PAPER_TAU, unmeasured
from results.gates import QUARTERS, THRESHOLDS, by_quarter
from results.names import WITHOUT_POOL, display_name
from results.records import Run
from results.tables import Column, Footer, provenance, register

_BENCH = Column("bench", "Bench", "string")
_METHOD = Column("method", "Method", "string")
_VARIANT = Column("variant", "Variant", "string", hide_if_empty=True)

SETUP = (
    _BENCH,
    Column("agents", "Agents", "string"),
    Column("workflow", "Workflow", "string"),
    Column("n", "n", "Int64"),
    _METHOD,
    _VARIANT,
    Column("threshold", "Threshold", digits=4),
    Column("paper_tau", "Paper's tau", digits=2),
    Column("target_rho", "Target rho", digits=2),
    Column("rho_entry", "rho entry", digits=3),
    *(
        Column(f"rho_quarter_{i}", f"Quarter {i}", digits=2, hide_if_empty=True)
        for i in range(1, QUARTERS + 1)
    ),
    Column("unjudged_percent", "Unjudged %", digits=1, hide_if_empty=True),
)
LENGTHS = (
    _BENCH,
    _METHOD,
    _VARIANT,
    Column("n", "n", "Int64"),
    Column("mean_tokens", "Mean", digits=1),
    Column("max_tokens", "Max", "Int64"),
    Column("mean_processed", "Mean over all turns", digits=1),
    Column("max_processed", "Max over all turns", "Int64"),
)
ORDERS = (
    _BENCH,
    _METHOD,
    _VARIANT,
    Column("n", "n", "Int64"),
    Column("runs", "Runs", "Int64"),
    Column("accuracy_percent", "Mean accuracy %", digits=1),
    Column("std_points", "Std, points", digits=2),
    Column("order", "Order of requests", "string"),
)


def _footer(command: str, *notes: str) -> Footer:
    def footer(runs: Sequence[Run]) -> tuple[str, ...]:
        return (*provenance(runs), *notes, *unmeasured(runs, BENCHES, command))

    return footer


def _frame(columns: Sequence[Column], rows: list[dict[str, object]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=[name for c in columns for name in c.frame_names])


def _identity(cell: Cell, runs: Sequence[Run]) -> dict[str, object]:
    samples = {sample.sample_id for run in runs for sample in run.samples}
    return {
        "bench": cell.bench,
        "method": display_name(cell.method),
        "variant": cell.label,
        "n": len(samples),
    }


@register(
    "3",
    title="workload configuration and reliability thresholds",
    columns=SETUP,
    kinds=("accuracy",),
    command="repro accuracy --bench BENCH",
    footer=_footer(
        "repro accuracy --bench BENCH",
        "threshold: tau of KVCMAS, gamma of KVComm; it depends on the model, so the paper's is no "
        "target. target rho: what it was calibrated for, on requests that are not evaluated",
        "quarters: rho entry of the first, second, ... quarter of the requests, in their order: "
        "pools go on changing. unjudged: reusable segments without anchors to ask the gate about",
    ),
)
def setup_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per benchmark and gated method; a benchmark without one has a row of its own."""
    rows = []
    shown: set[str] = set()
    with_gate = {r.info.bench for r in runs if r.info.method in THRESHOLDS and gated(r)}
    for cell, repeats in grouped([run for run in runs if gated(run)]).items():
        threshold = THRESHOLDS.get(cell.method)
        if threshold is None and (cell.bench in with_gate or cell.bench in shown):
            continue
        shown.add(cell.bench)
        info = repeats[0].info
        rows.append(
            {
                **_identity(cell, repeats),
                **({"method": "", "variant": ""} if threshold is None else {}),
                "agents": ", ".join(info.agents),
                "workflow": info.workflow,
                "threshold": None if threshold is None else info.settings.get(threshold),
                "paper_tau": PAPER_TAU.get(cell.bench),
                "target_rho": info.target_rho if threshold else None,
                **(_held(repeats) if threshold else {}),
            }
        )
    return _frame(SETUP, rows)


def _held(runs: Sequence[Run]) -> dict[str, object]:
    """The reuse that a threshold held, in all and along the requests."""
    turns = [turn for run in runs for turn in run.turns]
    edges = [edge for turn in turns for edge in turn.edges if edge.tokens and not edge.first]
    unjudged = [edge.action == "dense" and edge.entropy is None for edge in edges]
    return {
        "rho_entry": stats.rho(turns, "entry"),
        **{
            f"rho_quarter_{i}": stats.rho(part, "entry")
            for i, part in enumerate(by_quarter(runs), 1)
        },
        "unjudged_percent": 100 * stats.mean(unjudged),
    }


@register(
    "4",
    title="trajectory lengths in model tokens",
    columns=LENGTHS,
    kinds=("accuracy",),
    command="repro accuracy --bench BENCH",
    footer=_footer(
        "repro accuracy --bench BENCH",
        "length: the longest prompt of a trajectory with its output, which is what has accumulated "
        "at its end; over all turns: prompts and outputs of every turn added up. Visual tokens "
        "count",
    ),
)
def length_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per benchmark, method and variant: methods generate trajectories of their own."""
    rows = []
    for cell, repeats in grouped(runs).items():
        longest, processed = _lengths(repeats, max), _lengths(repeats, sum)
        rows.append(
            {
                **_identity(cell, repeats),
                "mean_tokens": stats.mean(longest),
                "max_tokens": max(longest, default=None),
                "mean_processed": stats.mean(processed),
                "max_processed": max(processed, default=None),
            }
        )
    return _frame(LENGTHS, rows)


def _lengths(runs: Sequence[Run], over_turns: Callable[[list[int]], int]) -> list[int]:
    """Per trajectory, the tokens of its turns taken together."""
    turns: dict[tuple[str, int], list[int]] = defaultdict(list)
    for run in runs:
        for turn in run.turns:
            key = (run.info.run_key, turn.sample_index)
            turns[key].append(turn.prompt_tokens + turn.output_tokens)
    return [over_turns(tokens) for tokens in turns.values()]


@register(
    "5",
    title="standard deviation of accuracy over orders of the requests",
    columns=ORDERS,
    kinds=("accuracy",),
    command="repro accuracy --bench BENCH --orders 3",
    footer=_footer(
        "repro accuracy --bench BENCH --orders 3",
        "decoding is greedy, so runs differ in the order of requests only; one run says nothing "
        "about the spread: repro accuracy --bench BENCH --orders 3",
    ),
)
def order_table(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per benchmark, method and variant; sample standard deviation over complete runs."""
    rows = []
    for cell, repeats in grouped(runs).items():
        complete = [run for run in repeats if len(run.samples) == run.info.n]
        accuracies = [100 * stats.mean(list(scores([run]).values())) for run in complete]
        mean, std = stats.mean_std(accuracies)
        rows.append(
            {
                **_identity(cell, complete),
                "runs": len(complete),
                "accuracy_percent": mean,
                "std_points": std,
                "order": "does not matter" if cell.method in WITHOUT_POOL else "matters",
            }
        )
    return _frame(ORDERS, rows)
