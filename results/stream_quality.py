"""What other runs say about the variants of an ablation: fidelity on GSM8K, letters on MMLU.

Cost does not depend on what a model knows, and accuracy not on how long a context is, so that a
variant's rows come from runs of different kinds. They are joined by method and variant, never by
model: the footer names what each is from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from results.comparable import split_settings
from results.names import display_name
from results.records import Run
from results.stream import StreamCell
from results.tables import Column, build_table

# Kind of run, its benchmark, its table, and which of that table's columns are taken.
_FIDELITY: Final = ("kl_first_nats", "k_error", "v_error")
_ACCURACY: Final = ("accuracy_percent", "difference_points")
KINDS: Final = ("fidelity", "accuracy")

COLUMNS = (
    Column("accuracy_percent", "MMLU % [95% CI]", digits=1, interval=True, hide_if_empty=True),
    Column(
        "difference_points", "vs NonShared [95% CI]", digits=1, interval=True, hide_if_empty=True
    ),
    Column(
        "kl_first_nats", "First-token KL nats [95% CI]", digits=4, interval=True, hide_if_empty=True
    ),
    Column("k_error", "K error [95% CI]", digits=4, interval=True, hide_if_empty=True),
    Column("v_error", "V error [95% CI]", digits=4, interval=True, hide_if_empty=True),
)

Variant = tuple[str, frozenset[str]]
"""Method and the parts of its label, in whatever order they were written."""


@dataclass(frozen=True)
class Quality:
    """Cells of :data:`COLUMNS` by variant, the runs behind them, and what they are from."""

    rows: dict[Variant, dict[str, float]]
    runs: tuple[Run, ...]
    notes: tuple[str, ...]


def variant_of(cell: StreamCell) -> Variant:
    """The variant of a single-stream cell."""
    return cell.method, frozenset(cell.label.split())


def quality(runs: Sequence[Run], wanted: Iterable[Variant]) -> Quality:
    """Look variants up in the runs of one model each, the one that knows most of them."""
    variants = set(wanted)
    rows: dict[Variant, dict[str, float]] = {}
    used: list[Run] = []
    notes = []
    for kind, bench, table, columns in (
        ("fidelity", "gsm8k", "fidelity", _FIDELITY),
        ("accuracy", "mmlu", "1", _ACCURACY),
    ):
        own = [run for run in runs if (run.info.kind, run.info.bench) == (kind, bench)]
        chosen = _most(own, variants)
        if not chosen:
            continue
        names = {display_name(method): method for method, _ in variants}
        for _, row in build_table(table, chosen).frame.iterrows():
            key = (names.get(row["method"], ""), frozenset(str(row["variant"]).split()))
            if key in variants:
                rows.setdefault(key, {}).update(_cells(row, columns))
        used += chosen
        n = ", ".join(sorted({str(run.info.n) for run in chosen}))
        notes.append(
            f"{bench} ({kind}): {chosen[0].info.model}, n = {n}, {chosen[0].info.hardware}"
        )
    return Quality(rows, tuple(used), tuple(notes))


def _most(runs: Sequence[Run], variants: set[Variant]) -> list[Run]:
    """Runs of the setting that has most of the variants, with NonShared beside them."""

    def known(run: Run) -> bool:
        return (run.info.method, frozenset(run.info.label.split())) in variants

    groups = [group for _, group in split_settings(runs)]
    best = max(groups, key=lambda group: sum(map(known, group)), default=[])
    if not any(map(known, best)):
        return []
    return [run for run in best if known(run) or run.info.method == "nonshared"]


def _cells(row: pd.Series, columns: Iterable[str]) -> dict[str, float]:
    return {
        name: float(row[name])
        for column in columns
        for name in (column, f"{column}_low", f"{column}_high")
        if not pd.isna(row[name])
    }


def with_notes(
    footer: Callable[[Sequence[Run]], tuple[str, ...]],
    choose: Callable[[Sequence[Run]], list[StreamCell]],
) -> Callable[[Sequence[Run]], tuple[str, ...]]:
    """A footer over single-stream runs that also names where quality comes from."""

    def over(runs: Sequence[Run]) -> tuple[str, ...]:
        streams = [run for run in runs if run.info.kind == "stream"]
        found = quality(runs, map(variant_of, choose(streams)))
        return (*found.notes, *footer(streams))

    return over
