"""Table 1: what each method scores on each benchmark and what it costs (paper section 4.2)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from results import stats
from results.accuracy import (
    ACCURACY,
    BASELINE,
    BOOTSTRAP_SEED,
    DIFFERENCE,
    FLOOR,
    INTERVALS,
    Cell,
    accuracy_cells,
    baseline_scores,
    difference_cells,
    grouped,
    scores,
)
from results.benches import BENCHES, unmeasured
from results.names import display_name
from results.records import Run
from results.schema import SampleRecord, TurnRecord
from results.tables import Column, provenance, register

# Of multiple-choice questions.
LETTERS = frozenset("ABCDEFGHIJ")

COLUMNS = (
    Column("bench", "Bench", "string"),
    Column("data", "Data", "string"),
    Column("method", "Method", "string"),
    Column("variant", "Variant", "string", hide_if_empty=True),
    Column("pool_state", "Pool at start", "string"),
    Column("n", "n", "Int64"),
    Column("runs", "Runs", "Int64"),
    ACCURACY,
    DIFFERENCE,
    Column("n_paired", "n paired", "Int64"),
    Column("p_holm", "p (Holm)", digits=3, hide_if_empty=True),
    Column("recovered_percent", "Gap recovered %", digits=0, hide_if_empty=True),
    Column("extraction_failures", "No answer", "Int64"),
    Column("unanswered_percent", "No answer %", digits=1),
    Column("commonest_percent", "Commonest letter %", digits=1, hide_if_empty=True),
    Column("latency_s", "Latency s", digits=2),
    Column("ttft_s", "TTFT s", digits=3),
    Column("peak_memory_gb", "Peak GB", digits=2),
    Column("pool_bytes", "Pool MB", "Int64", digits=2, scale=1e-6),
    Column("rho_entry", "rho entry", digits=3),
    Column("rho_transition", "rho transition", digits=3),
    Column("rho_call", "rho call", digits=3),
    Column("rho_entry_with_first", "rho incl. first", digits=3),
    Column("executed_rows", "Executed rows", digits=1),
    Column("kl_nats", "KL nats", digits=4),
    Column("agreement_percent", "Agree %", digits=1),
    Column("n_kl", "n KL", "Int64"),
)


def footer(runs: Sequence[Run]) -> tuple[str, ...]:
    """Provenance, and what the columns leave out."""
    unscored = sum(sample.correct is None for run in runs for sample in run.samples)
    notes = [
        INTERVALS,
        "p: exchange of pairs against NonShared, adjusted over the methods of a benchmark (Holm)",
        "gap recovered: (method - FullShared) / (NonShared - FullShared) over the questions that"
        " all three answered; empty where NonShared is not above FullShared",
        "latency, TTFT, peak memory: single stream, one request after another (the paper: 1 QPS)",
    ]
    missing = {run.info.bench: len(run.info.missing) for run in runs if run.info.missing}
    notes += [
        f"{bench}: {count} samples are left out, their image or clip was not there"
        for bench, count in sorted(missing.items())
    ]
    if any(_commonest(run.samples) is not None for run in runs):
        notes.append(
            "commonest letter: its share of the answers; at 100 the model says the same whatever"
            " is asked, and its accuracy is how often that letter is right"
        )
    if unscored:
        notes.append(f"{unscored} answers were not scored and are not part of the accuracy")
    notes += unmeasured(runs, BENCHES, "repro accuracy --bench BENCH")
    return (*provenance(runs), *notes)


@register(
    "1",
    title="accuracy, end-to-end latency, TTFT, peak memory and reuse ratio",
    columns=COLUMNS,
    kinds=("accuracy",),
    command="repro accuracy --bench BENCH",
    footer=footer,
)
def build(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per benchmark, method, variant, pool state and n; repetitions are averaged."""
    ceilings, floors = baseline_scores(runs), baseline_scores(runs, FLOOR)
    rows = [
        _row(cell, repeats, ceilings.get(cell.bench, {}), floors.get(cell.bench, {}))
        for cell, repeats in grouped(runs).items()
    ]
    for bench in dict.fromkeys(row["bench"] for row in rows):
        _adjust([row for row in rows if row["bench"] == bench and row["p_holm"] is not None])
    return pd.DataFrame(rows, columns=[name for column in COLUMNS for name in column.frame_names])


def _adjust(family: Sequence[dict[str, Any]]) -> None:
    """Replace the p-values of one benchmark's methods by those adjusted for their number."""
    adjusted = stats.holm_bonferroni([row["p_holm"] for row in family])
    for row, p in zip(family, adjusted, strict=True):
        row["p_holm"] = p


def _row(
    cell: Cell, runs: Sequence[Run], ceiling: Mapping[str, float], floor: Mapping[str, float]
) -> dict[str, Any]:
    samples = [sample for run in runs for sample in run.samples]
    turns = [turn for run in runs for turn in run.turns]
    own = scores(runs)
    baseline = {} if cell.method == BASELINE else ceiling
    difference, n_paired = difference_cells(own, baseline)
    kls = [turn.first_token.kl for turn in turns if turn.first_token.kl is not None]
    agreed = [turn.first_token.agree for turn in turns if turn.first_token.agree is not None]
    peak = max((turn.peak_memory_bytes or 0 for turn in turns), default=0)
    executed = sum(turn.entries.executed / turn.layers for turn in turns)
    return {
        "bench": cell.bench,
        "data": runs[0].info.data,
        "method": display_name(cell.method),
        "variant": cell.label,
        "pool_state": cell.pool_state,
        "n": len({sample.sample_id for sample in samples}),
        "runs": len(runs),
        **accuracy_cells(own),
        **difference,
        "n_paired": n_paired or None,
        "p_holm": _p_value(own, baseline) if n_paired else None,
        "recovered_percent": _recovered(own, ceiling, floor),
        "extraction_failures": sum(sample.failure is not None for sample in samples)
        if samples
        else None,
        "unanswered_percent": 100 * stats.mean([sample.failure is not None for sample in samples]),
        "commonest_percent": _commonest(samples),
        "latency_s": stats.mean([sample.e2e_s for sample in samples]),
        "ttft_s": stats.mean(_trajectory_ttfts(runs)),
        "peak_memory_gb": peak / 1e9 if peak else None,
        "pool_bytes": max((turn.pool_bytes for turn in turns), default=None),
        "rho_entry": stats.rho(turns, "entry"),
        "rho_transition": stats.rho(turns, "transition"),
        "rho_call": stats.rho(turns, "call"),
        "rho_entry_with_first": stats.rho(turns, "entry", include_first=True),
        "executed_rows": executed / len(samples) if samples else math.nan,
        "kl_nats": stats.mean(kls),
        "agreement_percent": 100 * stats.mean(agreed),
        "n_kl": len(kls) or None,
    }


def _commonest(samples: Sequence[SampleRecord]) -> float | None:
    """Percent of answers that are the commonest one; None where right ones are no letters."""
    if not all(sample.expected in LETTERS for sample in samples):
        return None
    letters = Counter(sample.extracted for sample in samples if sample.extracted is not None)
    return 100 * max(letters.values()) / letters.total() if letters else None


def _p_value(own: Mapping[str, float], baseline: Mapping[str, float]) -> float:
    common = [key for key in own if key in baseline]
    return stats.paired_p_value(
        [own[key] for key in common], [baseline[key] for key in common], seed=BOOTSTRAP_SEED
    )


def _recovered(
    own: Mapping[str, float], ceiling: Mapping[str, float], floor: Mapping[str, float]
) -> float | None:
    """Percent of the gap from FullShared to NonShared; None where there is no gap to close."""
    common = [key for key in own if key in ceiling and key in floor]
    method, low, high = (stats.mean([s[key] for key in common]) for s in (own, floor, ceiling))
    return 100 * stats.recovered_gap(method, low, high) if common and high > low else None


def _trajectory_ttfts(runs: Sequence[Run]) -> list[float]:
    """Mean TTFT of each trajectory's turns, in seconds; turns without a token are left out."""
    means = []
    for run in runs:
        turns: dict[int, list[TurnRecord]] = defaultdict(list)
        for turn in run.turns:
            turns[turn.sample_index].append(turn)
        for trajectory in turns.values():
            times = [turn.ttft_s for turn in trajectory if turn.ttft_s is not None]
            if times:
                means.append(stats.mean(times))
    return means
