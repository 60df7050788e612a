"""Printing and writing tables, the claim ledger and the list of methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method, method_names
from repro.commands.console import output_console
from results.evidence import Evidence, read_evidence
from results.tables import Table, build_table, known_tables

# Terminal views of a wide table: the columns each shows after the row's name.
VIEWS = {
    "1": {
        "quality": (
            "n",
            "accuracy_percent",
            "difference_points",
            "p_holm",
            "recovered_percent",
            "extraction_failures",
            "kl_nats",
            "agreement_percent",
            "n_kl",
        ),
        "cost": ("latency_s", "ttft_s", "peak_memory_gb", "pool_bytes", "executed_rows"),
        "reuse": ("rho_entry", "rho_transition", "rho_call", "rho_entry_with_first"),
    },
    "fidelity": {
        "answers": (
            "n",
            "n_turns",
            "kl_first_nats",
            "kl_first_difference_nats",
            "kl_last_nats",
            "kl_answer_nats",
            "agreement_percent",
        ),
        "caches": (
            "k_error",
            "v_error",
            "k_error_accepted",
            "v_error_accepted",
            "k_error_refused",
            "v_error_refused",
        ),
        "split": ("kl_accepted_nats", "n_accepted", "kl_refused_nats", "n_refused"),
        "reuse": ("rho_entry", "rho_transition", "rho_call", "n_warm"),
        "work": (
            "touched_rows",
            "row_layers",
            "row_layers_accepted",
            "executed_flops",
            "reference_tokens",
        ),
        "time and memory": ("ttft_s", "ttft_ratio", "pool_bytes", "reference_bytes"),
    },
    "ttft": {
        "time": ("n", "anchors", "ttft_s", "ttft_ratio", "plan_share", "build_ratio"),
        "work": ("row_layers", "row_layers_ratio", "flops_ratio", "reference_tokens"),
    },
}
SERVING = {
    "median": ("state", "n", "lost", "ttft_p50_s", "speedup_p50", "work_bound"),
    "tail": ("ttft_p90_s", "speedup_p90", "work_bound"),
    "load": (
        *("qps_here", "load", "offered", "served_per_s"),
        *("queue_p50_s", "service_s", "build_s"),
    ),
    "reuse": ("rho_entry", "rho_transition", "executed_share", "prefix_hits", "fallbacks"),
    "memory": ("pool", "pool_bytes", "memory_bytes"),
    "decoding": ("inter_token_p50_s", "inter_token_p90_s", "tokens_per_s", "goodput_per_s"),
}
MODES = ("", "-emulated", "-modelled")
VIEWS |= {f"{number}{mode}": SERVING for number in ("7", "9", "10") for mode in MODES}
HEADLINE = ("claim", "quantity", "paper", "value", "bound", "full_prefills", "trace", "n")
VIEWS |= {f"headline{mode}": {"": HEADLINE} for mode in MODES}
VIEWS["model-check"] = {
    "median": ("n", "real_p50_s", "modelled_p50_s", "error_p50"),
    "tail": ("n", "real_p90_s", "modelled_p90_s", "error_p90"),
}
STREAM = {
    "time": ("state", "n", "ttft_s", "speedup", "work_bound", "rho_entry"),
    "throughput": ("tokens_per_s", "generated_per_s", "e2e_s", "build_s", "decode_s"),
    "work": ("gflop", "moved_bytes", "flop_share", "byte_share", "roofline_share"),
}
MEMORY = {
    "held": ("state", "held_bytes", "held_ratio", "needed_bytes", "limit_bytes", "rho_entry"),
    "categories": (
        *("weights_bytes", "active_bytes", "sources_bytes", "pool_base_bytes", "pool_delta_bytes"),
        *("references_bytes", "transient_bytes"),
    ),
    "system": ("resident_bytes", "allocated_bytes", "reserved_bytes", "driver_bytes"),
}
VARIED = {
    "time": ("state", "capacity", "agents", "rounds", "n", "ttft_s", "speedup", "work_bound"),
    "throughput": STREAM["throughput"],
    "memory": ("held_bytes", "pool_bytes", "needed_bytes", "resident_bytes", "allocated_bytes"),
    "quality": ("accuracy_percent", "difference_points", "kl_first_nats", "k_error", "v_error"),
    "reuse": ("rho_set", "rho_entry", "rho_transition"),
}
VIEWS |= {"11": MEMORY, "12": STREAM, **dict.fromkeys(("13", "14", "15"), VARIED)}
# What a table is written as.
FORMATS = ("csv", "parquet", "md", "tex")
NAMES = ("setting", "bench", "arrival", "qps", "rho", "method", "variant")


def show_table(number: str, runs: Path, out: Path | None) -> None:
    """Build table ``number`` from all records below ``runs``; print it, and write it if asked."""
    evidence = read_evidence(runs)
    table = build_table(number, evidence.runs, evidence.analyses)
    print_table(output_console(), table)
    if out is not None:
        for path in write_table(table, out):
            Console(stderr=True).print(f"wrote {path}")


def write_tables(runs: Path, out: Path) -> dict[str, Table]:
    """Write every table from all records below ``runs``, and say which are empty.

    Raises:
        UserError: ``out`` cannot be written.
        ResultsError: records that cannot be read, or cannot share a table.
    """
    notes = Console(stderr=True)
    made = make_tables(read_evidence(runs))
    for number, table in made.items():
        write_table(table, out)
        state = f"{len(table.frame)} rows" if len(table.frame) else table.footer[0]
        notes.print(f"table {number}: {state}", style="dim", highlight=False)
    notes.print(f"tables are in {out}")
    return made


def make_tables(evidence: Evidence) -> dict[str, Table]:
    """Every table of the registry but empty variants of a paper's table (``7-modelled``).

    Raises:
        ResultsError: records that cannot share a table.
    """
    tables = {n: build_table(n, evidence.runs, evidence.analyses) for n in known_tables()}
    return {
        number: table
        for number, table in tables.items()
        if len(table.frame) or number.partition("-")[0] not in tables or "-" not in number
    }


def print_table(console: Console, table: Table) -> None:
    """Print a table in views that fit a terminal, then its footer."""
    console.print(f"[bold]Table {table.spec.number}: {table.spec.title}[/]")
    for line in table.header:
        console.print(line, highlight=False, markup=False)
    shown = {column.name for column in table.shown()}
    names = [name for name in NAMES if name in shown]
    if "bench" in names and table.frame["bench"].nunique() == 1:
        names.remove("bench")  # the footer names it
    views = VIEWS.get(table.spec.number) or {"": tuple(n for n in shown if n not in names)}
    for view in views.values():
        chosen = [name for name in view if name in shown]
        if not chosen:
            continue
        columns = [*names, *chosen]
        rich_table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for i, heading in enumerate(table.headings(columns)):
            rich_table.add_column(
                heading,
                justify="left" if i < len(names) else "right",
                no_wrap=columns[i] in ("arrival", "method"),
            )
        for row in table.display_rows(columns):
            rich_table.add_row(*row)
        console.print(rich_table)
        console.print()
    for line in table.footer:
        loud = "bold yellow" if line.startswith("data=procedural") else "dim"
        console.print(line, style=loud, highlight=False, markup=False)


def write_table(table: Table, directory: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a table in each of the formats; returns the paths.

    Raises:
        UserError: the directory cannot be written.
    """
    base = directory / f"table{table.spec.number}"
    writers: dict[str, Callable[[Path], object]] = {
        "csv": table.to_csv,
        "parquet": table.to_parquet,
        "md": lambda path: path.write_text(table.to_markdown(), encoding="utf-8"),
        "tex": lambda path: path.write_text(table.to_latex(), encoding="utf-8"),
    }
    paths = [base.with_suffix(f".{suffix}") for suffix in formats]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, suffix in zip(paths, formats, strict=True):
            writers[suffix](path)
    except OSError as error:
        raise UserError(f"cannot write tables to {directory}: {error.strerror}") from error
    return paths


def show_methods() -> None:
    """Print every registered method with its settings and their defaults."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("what it does", overflow="fold")
    table.add_column("settings", overflow="fold")
    for name in method_names():
        summary = (find_method(name).__doc__ or "").strip().splitlines()[0]
        settings = make_method(name).settings()
        table.add_row(name, summary, " ".join(f"{k}={v}" for k, v in settings.items()))
    output_console().print(table)
