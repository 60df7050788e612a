"""Where the headline comes from: C01 to C05 from real, from emulated and from modelled cells.

Three tables, because the three never share one; and how far the queue model is from real cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from results import stats
from results.claims import load_claims
from results.comparable import split_settings
from results.names import display_name
from results.records import Run
from results.serving import ServedCell, of_mode, served_cells, too_few
from results.serving_claims import LAW, compared, headline_pairs, percentile_of
from results.serving_tables import footer
from results.tables import Column, provenance, register

CLAIMS = ("C01", "C02", "C03", "C04", "C05")

HEADLINE_COLUMNS = (
    Column("claim", "Claim", "string"),
    Column("quantity", "TTFT ratio", "string"),
    Column("paper", "Paper", digits=2),
    Column("value", "Value [95% CI]", digits=2, interval=True),
    Column("bound", "Work bound", digits=2),
    Column("full_prefills", "Full prefills", "string", hide_if_empty=True),
    Column("trace", "Trace", "string"),
    Column("n", "n", "Int64"),
)

CHECK_COLUMNS = (
    Column("bench", "Trace", "string"),
    Column("arrival", "Arrivals", "string"),
    Column("qps", "QPS", digits=2),
    Column("rho", "rho", digits=2),
    Column("method", "Method", "string"),
    Column("variant", "Variant", "string", hide_if_empty=True),
    Column("n", "n", "Int64"),
    Column("real_p50_s", "p50 s", digits=3),
    Column("modelled_p50_s", "Modelled p50 s", digits=3),
    Column("error_p50", "p50 error %", digits=1, scale=100),
    Column("real_p90_s", "p90 s", digits=3),
    Column("modelled_p90_s", "Modelled p90 s", digits=3),
    Column("error_p90", "p90 error %", digits=1, scale=100),
)


def _register(number: str, title: str, kind: str, command: str) -> None:
    @register(
        number,
        title=title,
        columns=HEADLINE_COLUMNS,
        kinds=(kind,),
        command=command,
        footer=_used,
    )
    def build(runs: Sequence[Run]) -> pd.DataFrame:
        cells = [cell for cell in served_cells(runs) if cell.serve.arrival == LAW]
        rows = [row for name in CLAIMS for row in _rows(name, cells)]
        return pd.DataFrame(rows, columns=[n for c in HEADLINE_COLUMNS for n in c.frame_names])


def _used(runs: Sequence[Run]) -> tuple[str, ...]:
    """Footer of the runs that are compared."""
    groups = [served_cells(group) for _, group in split_settings(runs)]
    pairs = [pair for cells in groups for name in CLAIMS for pair in headline_pairs(name, cells)]
    used = {run.info.run_key: run for pair in pairs for cell in pair for run in cell.runs}
    return footer(list(used.values())) if used else ("no records at the paper's serving point yet",)


def _rows(claim_id: str, cells: Sequence[ServedCell]) -> list[dict[str, object]]:
    claim = next(claim for claim in load_claims() if claim.id == claim_id)
    rows: list[dict[str, object]] = []
    for value in claim.paper_values:
        for upper, lower in headline_pairs(claim_id, cells):
            found = compared(upper, lower, percentile_of(value))
            rows.append(
                {
                    "claim": claim_id,
                    "quantity": found.quantity,
                    "paper": value.value,
                    "value": found.value,
                    "value_low": found.low,
                    "value_high": found.high,
                    "bound": found.bound,
                    "full_prefills": "; ".join(filter(None, map(_full_prefills, (upper, lower)))),
                    "trace": upper.key.load.bench,
                    "n": len(lower.requests),
                }
            )
    return rows


def _full_prefills(cell: ServedCell) -> str:
    """``KVCMAS 31 of 68``, where the cell's record says so."""
    described = cell.serve.schedule
    if "full_prefills" not in described:
        return ""
    name = f"{display_name(cell.key.method)} {cell.key.label}".strip()
    return f"{name} {described['full_prefills']} of {described['requests']}"


def errors(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Every real cell that was predicted, beside its prediction; error is modelled / real - 1."""
    rows = []
    for _, group in split_settings(runs):
        modelled = {cell.key: cell for cell in served_cells(of_mode(group, "modelled"))}
        for cell in served_cells(of_mode(group)):
            if (other := modelled.get(cell.key)) is not None:
                rows.append(_compared(cell, other))
    return rows


def _compared(cell: ServedCell, other: ServedCell) -> dict[str, object]:
    return {
        "bench": cell.key.load.bench,
        "arrival": cell.key.load.arrival,
        "qps": cell.key.load.qps,
        "rho": cell.key.rho,
        "method": display_name(cell.key.method),
        "variant": cell.key.label,
        "n": len(cell.requests),
        **_error(cell, other, 50),
        **_error(cell, other, 90),
    }


def _error(cell: ServedCell, other: ServedCell, q: int) -> dict[str, float]:
    real, predicted = (
        math.nan
        if too_few(q, len(one.requests))
        else stats.percentile([row.ttft_s for row in one.requests.values()], q)
        for one in (cell, other)
    )
    return {
        f"real_p{q}_s": real,
        f"modelled_p{q}_s": predicted,
        f"error_p{q}": predicted / real - 1,
    }


def summary(rows: Sequence[dict[str, object]]) -> str:
    """The median of the errors' sizes."""
    texts = []
    for q in (50, 90):
        sizes = [abs(float(str(row[f"error_p{q}"]))) for row in rows]
        if known := [size for size in sizes if not math.isnan(size)]:
            texts.append(f"p{q} {stats.percentile(known, 50):.1%} over {len(known)} cells")
    return f"median error of TTFT: {', '.join(texts) or 'no cell was predicted'}"


def _checked(runs: Sequence[Run]) -> tuple[str, ...]:
    rows = errors(runs)
    return (summary(rows), *provenance(of_mode(runs))) if rows else (summary(rows),)


@register(
    "model-check",
    title="The queue model against real cells, from single streams of the same methods",
    columns=CHECK_COLUMNS,
    kinds=("serve", "model"),
    command="repro model --validate RUNS --records",
    footer=_checked,
)
def _check(runs: Sequence[Run]) -> pd.DataFrame:
    return pd.DataFrame(errors(runs), columns=[n for c in CHECK_COLUMNS for n in c.frame_names])


_POINT = "--ctx 32k --qps 8"
_register("headline", "C01 to C05, real", "serve", f"repro serve --profile cpu {_POINT}")
_register(
    "headline-emulated",
    "C01 to C05, EMULATED",
    "emulate",
    f"repro serve --mode emulate --profile cpu {_POINT}",
)
_register("headline-modelled", "C01 to C05, MODELLED", "model", f"repro model --records {_POINT}")
