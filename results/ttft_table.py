"""Time to first token of one reuse turn, beside the work that was executed for it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from results import stats
from results.fidelity_table import BOOTSTRAP_SEED, COMMAND
from results.records import Run
from results.replay import CELL_COLUMNS, replays, reusable
from results.tables import Column, provenance, register

COLUMNS = (
    *CELL_COLUMNS,
    Column("n", "n", "Int64"),
    Column("anchors", "Anchors", "Int64"),
    Column("ttft_s", "TTFT s [95% CI]", digits=3, interval=True),
    Column("ttft_ratio", "TTFT / NonShared [95% CI]", digits=3, interval=True),
    Column("plan_share", "Plan share", digits=3),
    Column("row_layers", "Row-layers", digits=0),
    Column("row_layers_ratio", "Row-layers / NonShared", digits=3),
    Column("flops_ratio", "FLOP / NonShared", digits=3),
    Column("reference_tokens", "Reference tokens", digits=0),
    Column("build_ratio", "Building an anchor / NonShared TTFT", digits=3),
)


def footer(runs: Sequence[Run]) -> tuple[str, ...]:
    """Provenance and what is timed."""
    return (
        *provenance(runs),
        "random token ids, layout L0: 64 and 16 agent-specific tokens around the shared span",
        "gates are asked and accept; plan share: gate and weights; anchors are built later",
        f"ratios are paired by request, intervals: bootstrap, seed {BOOTSTRAP_SEED}",
    )


@register(
    "ttft",
    title="One reuse turn, everything accepted",
    columns=COLUMNS,
    kinds=("fidelity-timing",),
    command=COMMAND,
    footer=footer,
)
def build(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per cell; a request's reuse turn is its second."""
    groups = replays(runs)
    dense = {
        (replay.cell.bench, turn.sample_id): turn
        for replay in groups
        if replay.cell.method == "nonshared"
        for turn in replay.reuse_turns
    }
    rows = []
    for replay in groups:
        pairs = [
            (turn, dense[replay.cell.bench, turn.sample_id])
            for turn in replay.reuse_turns
            if (replay.cell.bench, turn.sample_id) in dense
        ]
        timed = [(t.ttft_s, d.ttft_s) for t, d in pairs if t.ttft_s and d.ttft_s]
        pool = max((turn.pool_entries for turn in replay.turns), default=0)
        filling = [turn for run in replay.runs for turn in run.fidelity if turn.warm]
        built = [t.times_s["build"] for t in filling if pool and reusable(t)]
        rows.append(
            {
                **replay.names(),
                "n": len(replay.reuse_turns),
                "anchors": pool,
                **_estimate("ttft_s", [own for own, _ in timed]),
                **_estimate("ttft_ratio", [own / other for own, other in timed]),
                "plan_share": stats.mean(
                    [t.times_s["plan"] / t.ttft_s for t, _ in pairs if t.ttft_s]
                ),
                "row_layers": stats.mean([t.row_layers for t, _ in pairs]),
                "row_layers_ratio": stats.mean([t.row_layers / d.row_layers for t, d in pairs]),
                "flops_ratio": stats.mean([t.executed_flops / d.executed_flops for t, d in pairs]),
                "reference_tokens": stats.mean([t.reference_tokens for t, _ in pairs]),
                "build_ratio": stats.mean(built) / stats.mean([d for _, d in timed])
                if built and timed
                else None,
            }
        )
    return pd.DataFrame(rows, columns=[name for column in COLUMNS for name in column.frame_names])


def _estimate(name: str, values: Sequence[float]) -> dict[str, float]:
    estimate = stats.cluster_bootstrap(
        values, [str(i) for i in range(len(values))], seed=BOOTSTRAP_SEED
    )
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
