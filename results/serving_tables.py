"""Tables 7, 9 and 10: TTFT under load (paper B.4 to B.6), one row per method and load.

Table 7 has every method over contexts and rates, Table 9 KVCMAS chained against non-chained, Table
10 long outputs at one context. Every speed-up stands beside its work bound. Cells whose methods
really ran, emulated and modelled ones have tables of their own: 7, 7-emulated, 7-modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd

from results import stats
from results.names import display_name
from results.records import RequestRecord, Run
from results.serving import (
    BOOTSTRAP_SEED,
    EXACT,
    LEAST_FOR_P90,
    ServedCell,
    in_comparison,
    ratios_of,
    serve_of,
    served_cells,
    speed_up,
)
from results.stats import Estimate
from results.tables import Column, provenance, register

Select = Callable[[Sequence[Run]], list[Run]]

_MODES = {
    "emulated": "EMULATED: prompts of the public harness's cost model on a real engine with its"
    " prefix cache; no method shared or corrected a cache",
    "modelled": "MODELLED: a queue model; nothing was run",
}

# Outputs longer than the trace's usual ones make the study of Table 10.
USUAL_OUTPUT = 128

COLUMNS = (
    Column("bench", "Trace", "string"),
    Column("arrival", "Arrivals", "string"),
    Column("qps", "QPS", digits=2),
    Column("rho", "rho", "string"),
    Column("method", "Method", "string"),
    Column("variant", "Variant", "string", hide_if_empty=True),
    Column("state", "Not run", "string", hide_if_empty=True),
    Column("n", "n", "Int64"),
    Column("lost", "Lost", "Int64"),
    Column("runs", "Runs", "Int64"),
    Column("ttft_p50_s", "p50 TTFT s [95% CI]", digits=3, interval=True),
    Column("ttft_p90_s", "p90 TTFT s [95% CI]", digits=3, interval=True),
    Column("speedup_p50", "p50 speed-up [95% CI]", digits=2, interval=True),
    Column("speedup_p90", "p90 speed-up [95% CI]", digits=2, interval=True),
    Column("work_bound", "Work bound", digits=2),
    Column("p50_run_low_s", "Lowest run p50 s", digits=3, hide_if_empty=True),
    Column("p50_run_high_s", "Highest run p50 s", digits=3, hide_if_empty=True),
    Column("p90_run_low_s", "Lowest run p90 s", digits=3, hide_if_empty=True),
    Column("p90_run_high_s", "Highest run p90 s", digits=3, hide_if_empty=True),
    Column("queue_p50_s", "p50 queue s", digits=3),
    Column("service_s", "Start to token s", digits=3),
    Column("build_s", "Anchors s", digits=3),
    Column("qps_here", "Rate here /s", digits=3),
    Column("load", "Rate / capacity", digits=2),
    Column("offered", "Offered / asked", digits=3),
    Column("served_per_s", "Served /s", digits=3),
    Column("rho_entry", "rho entry", digits=3),
    Column("rho_transition", "rho transition", digits=3),
    Column("executed_share", "Executed entries", digits=3),
    Column("prefix_hits", "Prefix hits", "Int64"),
    Column("fallbacks", "Fallbacks", "Int64"),
    Column("pool", "Pool at start", "string"),
    Column("pool_bytes", "Pool MB", "Int64", digits=1, scale=1e-6),
    Column("memory_bytes", "Needs GB", "Int64", digits=2, scale=1e-9),
    Column("inter_token_p50_s", "p50 inter-token s", digits=4, hide_if_empty=True),
    Column("inter_token_p90_s", "p90 inter-token s", digits=4, hide_if_empty=True),
    Column("tokens_per_s", "Tokens /s", digits=1, hide_if_empty=True),
    Column("goodput_per_s", "Goodput /s", digits=3, hide_if_empty=True),
)


def header(runs: Sequence[Run]) -> tuple[str, ...]:
    """What the load was, on what it was served, and what its rates count."""
    serves = [serve_of(run) for run in runs]

    def values(name: str) -> str:
        return ", ".join(sorted({f"{getattr(serve, name)}" for serve in serves}))

    requests = sorted({len(run.requests) + len(run.lost) for run in runs} - {0})
    served = sorted({f"{run.info.engine} on {run.info.model}" for run in runs})
    return (
        f"{values('mode')}, layout {values('layout')}, every length divided by {values('scale')},"
        f" n = {', '.join(map(str, requests))} requests a run, arrivals {values('arrival')},"
        f" {values('clock')} clock, {', '.join(served)}, rho kinds {values('rho_kind')}.",
        "QPS counts agent requests per second, 0 is a single stream; TTFT is from the intended"
        " arrival.",
    )


def footer(runs: Sequence[Run]) -> tuple[str, ...]:
    """How the numbers came about, and provenance."""
    serves = [serve_of(run) for run in runs]
    scales = ", ".join(sorted({f"{serve.time_scale:.3g}" for serve in serves}))
    decoded = any(serve.decode for serve in serves)
    lines = [_MODES[mode] for mode in sorted({serve.mode for serve in serves}) if mode in _MODES]
    lines += [
        "requests end with their first token"
        + ("; where they are decoded, outputs are forced" if decoded else "")
        + "; caches of recorded outputs are made outside the timed path, the clock stops meanwhile",
        f"seconds here per second of the paper's GPU: {scales}; rates are asked for in its seconds",
        "speed-ups over NonShared, on the same requests; capacity: NonShared's in a single stream",
        f"p90 from {LEAST_FOR_P90} requests on; intervals: bootstrap over workflows, seed"
        f" {BOOTSTRAP_SEED}",
        "work bound: speed-up if prompt tokens were all that costs; at rates between two"
        " capacities latencies can be further apart",
    ]
    own = [line for line in provenance(runs) if not line.startswith("data=procedural")]
    return (*lines, *own)


def _usual(runs: Sequence[Run]) -> list[Run]:
    """Table 7: every method but the non-chained ablation, with the trace's usual outputs."""
    return [run for run in runs if not _long(run) and not _ablation(run)]


def _chaining(runs: Sequence[Run]) -> list[Run]:
    """Table 9: KVCMAS with both sources, once both were served, and NonShared beside them."""
    own = [run for run in runs if not _long(run) and run.info.method in ("kvcmas", EXACT)]
    return own if any(_ablation(run) for run in own) else []


def _long_outputs(runs: Sequence[Run]) -> list[Run]:
    """Table 10: every method but the non-chained ablation, with longer outputs."""
    return [run for run in runs if _long(run) and not _ablation(run)]


def _register_all(number: str, title: str, select: Select, load: str, choice: str = "") -> None:
    """The table of real cells, and those of cells whose methods did not run.

    ``load`` are options of both commands, ``choice`` those of `repro serve` alone.
    """
    options = f"{load} {choice}".strip()
    _register(number, title, "serve", f"repro serve {options}", select)
    command = f"repro serve --mode emulate {options}"
    _register(f"{number}-emulated", f"{title}, EMULATED", "emulate", command, select)
    command = f"repro model --records {load}"
    _register(f"{number}-modelled", f"{title}, MODELLED", "model", command, select)


def _register(number: str, title: str, kind: str, command: str, select: Select) -> None:
    def notes(runs: Sequence[Run]) -> tuple[str, ...]:
        chosen = select(runs)
        return footer(chosen) if chosen else (f"no records yet; made by: {command}",)

    @register(
        number,
        title=title,
        columns=COLUMNS,
        kinds=(kind,),
        command=command,
        footer=notes,
        header=lambda runs: header(select(runs)),
    )
    def build(runs: Sequence[Run]) -> pd.DataFrame:
        return _frame(select(runs))


def _long(run: Run) -> bool:
    return serve_of(run).output_tokens > USUAL_OUTPUT


def _ablation(run: Run) -> bool:
    return run.info.method == "kvcmas" and not run.info.settings.get("chained", True)


def _frame(runs: Sequence[Run]) -> pd.DataFrame:
    cells = served_cells(runs)
    rows = []
    for rho in ratios_of(cells) or [0.0]:
        rows += [_row(cell, cells, rho) for cell in in_comparison(cells, rho)]
    return pd.DataFrame(rows, columns=[name for c in COLUMNS for name in c.frame_names])


def _row(cell: ServedCell, cells: Sequence[ServedCell], rho: float) -> dict[str, object]:
    serve, rows = cell.serve, list(cell.requests.values())
    p50_low, p50_high = cell.spread(50)
    p90_low, p90_high = cell.spread(90)
    executed = sum(row.entries.executed for row in rows)
    return {
        "bench": cell.key.load.bench,
        "arrival": _arrival(cell),
        "qps": serve.qps,
        "rho": _rho(cell, rho),
        "method": display_name(cell.key.method),
        "variant": cell.key.label,
        "state": "OOM" if cell.out_of_memory else "",
        "n": len(rows),
        "lost": cell.lost,
        "runs": len(cell.runs),
        **_estimate("ttft_p50_s", cell.ttft(50)),
        **_estimate("ttft_p90_s", cell.ttft(90)),
        **_estimate("speedup_p50", speed_up(cell, cells, 50)),
        **_estimate("speedup_p90", speed_up(cell, cells, 90)),
        "work_bound": serve.work_bound,
        "p50_run_low_s": p50_low,
        "p50_run_high_s": p50_high,
        "p90_run_low_s": p90_low,
        "p90_run_high_s": p90_high,
        "queue_p50_s": stats.percentile([row.queue_s for row in rows], 50),
        "service_s": stats.mean([row.ttft_s - row.queue_s for row in rows]),
        "build_s": stats.mean([row.times_s.get("build", 0.0) for row in rows]),
        "qps_here": serve.qps_here or None,
        "load": serve.qps_here / serve.capacity if serve.qps else None,
        "offered": _mean_over_runs(cell, _offered),
        "served_per_s": _mean_over_runs(cell, _served),
        "rho_entry": stats.rho(rows, "entry"),
        "rho_transition": stats.rho(rows, "transition"),
        "executed_share": executed / sum(r.entries.total for r in rows) if rows else None,
        "prefix_hits": sum(row.entries.prefix_hit for row in rows),
        "fallbacks": sum(row.fallback is not None for row in rows),
        "pool": serve.pool if serve.pool == "fresh" else _warm(serve.pool),
        "pool_bytes": max((row.pool_bytes for row in rows), default=None),
        "memory_bytes": serve.memory_needed_bytes,
        **_decoding(cell),
    }


def _arrival(cell: ServedCell) -> str:
    """The law, and what else tells this load from the usual one."""
    serve = cell.serve
    extra = (
        (serve.clock == "wall", "wall clock"),
        (serve.decode, "decoded"),
        (cell.key.rho_kind == "gate", "live gate"),
    )
    return ", ".join([serve.arrival, *(text for applies, text in extra if applies)])


def _rho(cell: ServedCell, rho: float) -> str:
    """The comparison's ratio, and the method's own where it is another one."""
    own = cell.serve.rho_method
    if cell.key.rho_kind == "budget" and own is not None:
        return f"{rho:g} ({own:g})"
    return f"{rho:g}"


def _warm(pool: str) -> str:
    """``kvcmas-10-<key>`` was filled by ten workflows."""
    return f"warm, {pool.split('-')[-2]} workflows"


def _estimate(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def _mean_over_runs(cell: ServedCell, value: Callable[[Run], float | None]) -> float | None:
    found = [v for run in cell.runs if (v := value(run)) is not None]
    return stats.mean(found) if found else None


def _offered(run: Run) -> float | None:
    """Rate of the intended arrivals over the rate asked for."""
    serve = serve_of(run)
    times = [row.arrival_s for row in run.requests]
    times += [row.arrival_s for row in run.lost if row.arrival_s is not None]
    if not serve.qps or len(times) < 2 or max(times) == min(times):
        return None
    return (len(times) - 1) / (max(times) - min(times)) / serve.qps_here


def _served(run: Run) -> float | None:
    """Answered requests per second, from the first arrival to the end of the last one."""
    if not run.requests:
        return None
    begin = min(row.arrival_s for row in run.requests)
    return len(run.requests) / (max(row.finished_s for row in run.requests) - begin)


def _decoding(cell: ServedCell) -> dict[str, float | None]:
    """Gaps between tokens, tokens per second, and requests per second within the SLO."""
    if not cell.serve.decode:
        names = ("inter_token_p50_s", "inter_token_p90_s", "tokens_per_s", "goodput_per_s")
        return dict.fromkeys(names)
    gaps = [gap for row in cell.requests.values() for gap in row.inter_token_s]
    return {
        "inter_token_p50_s": stats.percentile(gaps, 50),
        "inter_token_p90_s": stats.percentile(gaps, 90),
        "tokens_per_s": _mean_over_runs(cell, lambda run: _rate(run, _tokens)),
        "goodput_per_s": _mean_over_runs(cell, _goodput),
    }


def _goodput(run: Run) -> float | None:
    """Answered requests per second that met both limits; None where no limit was set."""
    serve = serve_of(run)
    ttft, gap = serve.slo_ttft_s, serve.slo_inter_token_s
    if ttft is None and gap is None:
        return None

    def met(row: RequestRecord) -> float:
        slow = ttft is not None and row.ttft_s > ttft
        return not slow and not (gap is not None and stats.mean(row.inter_token_s or [0]) > gap)

    return _rate(run, met)


def _tokens(row: RequestRecord) -> float:
    return len(row.inter_token_s) + 1


def _rate(run: Run, value: Callable[[RequestRecord], float]) -> float | None:
    """Sum of a value over the requests, per second of serving."""
    served = _served(run)
    return None if served is None else served * stats.mean([value(r) for r in run.requests])


_register_all("7", "TTFT under concurrent serving", _usual, "--ctx CTX --qps QPS")
_register_all(
    "9",
    "TTFT of chained and non-chained correction",
    _chaining,
    "--ctx CTX --qps QPS --methods nonshared,kvcmas",
    "--profile cpu",
)
_register_all(
    "10", "TTFT with long agent outputs", _long_outputs, "--ctx 2k --outputs 2048 --qps QPS"
)
