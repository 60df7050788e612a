"""Fidelity: what each method leaves on identical prompts, and what it executes to leave that.

Every method is replayed on the ids that NonShared produced, so differences between two methods are
paired by turn. Turns of one sample share their context and errors pass from one to the next; all
intervals therefore resample whole samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from results import stats
from results.records import Run
from results.replay import CELL_COLUMNS, Replay, TurnKey, accepted, replays, reusable
from results.schema import FidelityEdge, FidelityRecord
from results.tables import Column, provenance, register

BOOTSTRAP_SEED = 0
COMMAND = "repro fidelity --trace FILE"
_EXACT = "nonshared"
_UNCORRECTED = "fullshared"

Measured = Iterable[tuple[str, float]]
"""Values, each with the id of the sample it was measured on."""

COLUMNS = (
    *CELL_COLUMNS,
    Column("n", "n", "Int64"),
    Column("runs", "Runs", "Int64"),
    Column("n_warm", "n warm-up", "Int64"),
    Column("n_turns", "Reuse turns", "Int64"),
    Column("rho_entry", "rho entry", digits=3),
    Column("rho_transition", "rho transition", digits=3),
    Column("rho_call", "rho call", digits=3),
    Column("kl_first_nats", "KL first token [95% CI]", digits=4, interval=True),
    Column("kl_first_difference_nats", "vs FullShared [95% CI]", digits=4, interval=True),
    Column("kl_last_nats", "KL last turn [95% CI]", digits=4, interval=True),
    Column("kl_last_difference_nats", "last vs FullShared [95% CI]", digits=4, interval=True),
    Column("n_paired", "n paired", "Int64"),
    Column("kl_answer_nats", "KL T tokens [95% CI]", digits=4, interval=True),
    Column("agreement_percent", "Agree % [95% CI]", digits=1, interval=True),
    Column("k_error", "K error [95% CI]", digits=4, interval=True),
    Column("v_error", "V error [95% CI]", digits=4, interval=True),
    Column("kl_accepted_nats", "KL all accepted [95% CI]", digits=4, interval=True),
    Column("n_accepted", "n all accepted", "Int64"),
    Column("kl_refused_nats", "KL some refused [95% CI]", digits=4, interval=True),
    Column("n_refused", "n some refused", "Int64"),
    Column("k_error_accepted", "K error accepted [95% CI]", digits=4, interval=True),
    Column("v_error_accepted", "V error accepted [95% CI]", digits=4, interval=True),
    Column("k_error_refused", "K error refused [95% CI]", digits=4, interval=True),
    Column("v_error_refused", "V error refused [95% CI]", digits=4, interval=True),
    Column("touched_rows", "Touched rows", digits=1),
    Column("row_layers", "Row-layers", digits=0),
    Column("row_layers_accepted", "Row-layers all accepted", digits=0),
    Column("executed_flops", "GFLOP", digits=2, scale=1e-9),
    Column("reference_tokens", "Reference tokens", digits=1),
    Column("ttft_s", "TTFT s", digits=3),
    Column("ttft_ratio", "TTFT / NonShared", digits=3),
    Column("pool_bytes", "Pool MB", "Int64", digits=2, scale=1e-6),
    Column("reference_bytes", "Reference MB", "Int64", digits=2, scale=1e-6),
)


def footer(runs: Sequence[Run]) -> tuple[str, ...]:
    """Provenance, the number of answer tokens compared, and where the intervals come from."""
    most = max((len(turn.answer_kl) for run in runs for turn in run.fidelity), default=0)
    return (
        *provenance(runs),
        f"teacher-forced on NonShared's ids; T: at most {most} answer tokens per turn",
        f"intervals: bootstrap over samples, seed {BOOTSTRAP_SEED}; differences paired by turn",
    )


@register(
    "fidelity",
    title="Fidelity on recorded trajectories",
    columns=COLUMNS,
    kinds=("fidelity",),
    command=COMMAND,
    footer=footer,
)
def build(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per benchmark, method, variant, pool state and n; repetitions are averaged."""
    groups = replays(runs)
    return pd.DataFrame(
        [_row(replay, groups) for replay in groups],
        columns=[name for column in COLUMNS for name in column.frame_names],
    )


def _row(replay: Replay, groups: Sequence[Replay]) -> dict[str, object]:
    turns = replay.turns
    exact = _peers(replay, groups, _EXACT)
    uncorrected = _peers(replay, groups, _UNCORRECTED)
    if (replay.cell.method, replay.cell.label) == (_UNCORRECTED, ""):
        uncorrected = []  # no difference to itself
    return {
        **replay.names(),
        "n": len({turn.sample_id for turn in turns}),
        "runs": len(replay.runs),
        "n_warm": replay.n_warm,
        "n_turns": len(replay.reuse_turns),
        "rho_entry": stats.rho(turns, "entry"),
        "rho_transition": stats.rho(turns, "transition"),
        "rho_call": stats.rho(turns, "call"),
        **_outputs(replay, _per_turn(uncorrected, _first_kl)),
        **_caches(replay),
        **_cost(replay, _per_turn(exact, _ttft)),
    }


def _outputs(replay: Replay, uncorrected: Mapping[TurnKey, float]) -> dict[str, object]:
    """Divergence of the answers from NonShared's; ``uncorrected`` is FullShared's, per turn."""
    reuse = replay.reuse_turns
    last = [turn for turn in replay.turns if turn.last]
    whole = [turn for turn in reuse if _all_accepted(turn)]
    partly = [turn for turn in reuse if not _all_accepted(turn)]
    first_kls = _per_turn(reuse, _first_kl)
    kls = [(turn.sample_id, kl) for turn in reuse for kl in turn.answer_kl]
    agreed = [(turn.sample_id, 100.0 * same) for turn in reuse for same in turn.answer_agree]
    return {
        **_estimate("kl_first_nats", _first_kls(reuse)),
        **_difference("kl_first_difference_nats", first_kls, uncorrected),
        **_estimate("kl_last_nats", _first_kls(last)),
        **_difference("kl_last_difference_nats", _per_turn(last, _first_kl), uncorrected),
        "n_paired": len(_common(first_kls, uncorrected)) or None,
        **_estimate("kl_answer_nats", kls),
        **_estimate("agreement_percent", agreed),
        **_estimate("kl_accepted_nats", _first_kls(whole)),
        "n_accepted": len(whole),
        **_estimate("kl_refused_nats", _first_kls(partly)),
        "n_refused": len(partly),
    }


def _caches(replay: Replay) -> dict[str, float]:
    """Errors of K and V: of all edges, of the accepted and of the refused ones."""
    edges = list(replay.edges)
    return {
        **_errors("", edges),
        **_errors("_accepted", [(sample, edge) for sample, edge in edges if accepted(edge)]),
        **_errors("_refused", [(sample, edge) for sample, edge in edges if not accepted(edge)]),
    }


def _cost(replay: Replay, exact_ttfts: Mapping[TurnKey, float]) -> dict[str, object]:
    """Work, time and memory; ``exact_ttfts`` are NonShared's, in seconds per turn."""
    turns, reuse = replay.turns, replay.reuse_turns
    reference = sum(turn.reference_tokens for turn in turns)
    return {
        "touched_rows": stats.mean([turn.touched_rows for turn in reuse]),
        "row_layers": stats.mean([turn.row_layers for turn in reuse]),
        "row_layers_accepted": stats.mean([t.row_layers for t in reuse if _all_accepted(t)]),
        "executed_flops": stats.mean([turn.executed_flops for turn in reuse]),
        "reference_tokens": reference / replay.workflows if turns else math.nan,
        "ttft_s": stats.mean([turn.ttft_s for turn in reuse if turn.ttft_s is not None]),
        "ttft_ratio": _ratio(_per_turn(reuse, _ttft), exact_ttfts),
        "pool_bytes": max((turn.pool_bytes for turn in turns), default=None),
        "reference_bytes": max((turn.reference_bytes for turn in turns), default=None),
    }


def _peers(replay: Replay, groups: Iterable[Replay], method: str) -> list[FidelityRecord]:
    """Turns of another method at its defaults; it has no pool, so it is the same cold and warm."""
    wanted = (replay.cell.bench, method, "")
    return [
        turn
        for other in groups
        if (other.cell.bench, other.cell.method, other.cell.label) == wanted
        for turn in other.turns
    ]


def _all_accepted(turn: FidelityRecord) -> bool:
    return all(map(accepted, reusable(turn)))


def _first_kl(turn: FidelityRecord) -> float | None:
    return turn.answer_kl[0] if turn.answer_kl else None


def _ttft(turn: FidelityRecord) -> float | None:
    return turn.ttft_s


def _first_kls(turns: Iterable[FidelityRecord]) -> Measured:
    return [(turn.sample_id, turn.answer_kl[0]) for turn in turns if turn.answer_kl]


def _estimate(name: str, measured: Measured) -> dict[str, float]:
    pairs = list(measured)
    estimate = stats.cluster_bootstrap(
        [value for _, value in pairs], [sample for sample, _ in pairs], seed=BOOTSTRAP_SEED
    )
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _errors(suffix: str, edges: Iterable[tuple[str, FidelityEdge]]) -> dict[str, float]:
    """Errors of edges, each the mean over its layers."""
    measured = [(sample, stats.mean(e.k_error), stats.mean(e.v_error)) for sample, e in edges]
    return {
        **_estimate(f"k_error{suffix}", ((sample, k) for sample, k, _ in measured)),
        **_estimate(f"v_error{suffix}", ((sample, v) for sample, _, v in measured)),
    }


def _difference(
    name: str, mine: Mapping[TurnKey, float], other: Mapping[TurnKey, float]
) -> dict[str, float]:
    """Mine minus the other's over the turns that both measured."""
    return _estimate(name, ((key[0], mine[key] - other[key]) for key in _common(mine, other)))


def _ratio(mine: Mapping[TurnKey, float], other: Mapping[TurnKey, float]) -> float:
    """Ratio of the means over the turns that both measured."""
    common = _common(mine, other)
    if not common:
        return math.nan
    return stats.mean([mine[key] for key in common]) / stats.mean([other[key] for key in common])


def _common(mine: Mapping[TurnKey, float], other: Mapping[TurnKey, float]) -> list[TurnKey]:
    return [key for key in mine if key in other]


def _per_turn(
    turns: Iterable[FidelityRecord], value: Callable[[FidelityRecord], float | None]
) -> dict[TurnKey, float]:
    """A turn's value, the mean of its repetitions; turns without one are left out."""
    measured: dict[TurnKey, list[float]] = defaultdict(list)
    for turn in turns:
        if (number := value(turn)) is not None:
            measured[turn.sample_id, turn.turn_index].append(number)
    return {key: stats.mean(numbers) for key, numbers in measured.items()}
