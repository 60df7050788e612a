"""Runs the plan of a profile and makes what readers look at from its records."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table as RichTable

from kvcmas.errors import UserError
from repro.commands.console import INTERRUPTED, duration, output_console
from repro.commands.settings import check_writable
from repro.profiles import load_profile
from repro.runners.plan import REPRO, Ended, Interrupted, Plan, PlanCell, chosen, load_plan
from results.errors import ResultsError

FAILED = 1
"""Exit code when a cell failed."""


def run(
    profile: str,
    out: Path,
    only: Sequence[str],
    *,
    dry_run: bool,
    data: Path | None = None,
    program: tuple[str, ...] = REPRO,
) -> None:
    """Run what is missing; tables, figures, verdicts and report are always made again.

    ``data`` holds folders named like benchmarks, ``program`` runs the cells' arguments.

    Raises:
        UserError: an unknown profile or cell, or an output folder that cannot be written.
    """
    load_profile(profile)  # an unknown name is told of with the known ones
    try:
        plan = Plan(profile, chosen(load_plan(profile), only), out, program, data)
    except ValueError as error:
        raise UserError(str(error)) from error
    console, notes = output_console(), Console(stderr=True)
    if dry_run:
        console.print(_overview(plan))
        console.print(_left(plan), highlight=False)
        return
    check_writable(out)
    follow = _Follower(plan, notes)
    try:
        plan.run_all(follow.begin, follow.end)
    except Interrupted:
        console.print(_overview(plan))
        notes.print("interrupted; give the same command again to go on from there")
        raise typer.Exit(INTERRUPTED) from None
    made = _make(plan, notes)
    console.print(_overview(plan))
    for name, state in made.items():
        console.print(f"{name}: {state}", highlight=False)
    failed = [cell for cell in plan.cells if plan.ended(cell).state == "failed"]
    for cell in failed:
        console.print(f"{cell.name} failed, see {plan.failure(cell)}", style="red", highlight=False)
    if failed or "failed" in Counter(state.partition(":")[0] for state in made.values()):
        raise typer.Exit(FAILED)


class _Follower:
    """Says what begins and how it ended."""

    def __init__(self, plan: Plan, notes: Console) -> None:
        self._plan, self._notes = plan, notes

    def begin(self, cell: PlanCell) -> None:
        """One line before a cell."""
        number, total = self._plan.cells.index(cell) + 1, len(self._plan.cells)
        about = self._plan.estimate()[cell.name]
        time = "" if about is None else f", about {duration(about)}"
        log = self._plan.log(cell)
        self._notes.print(f"[{number}/{total}] {cell.name}{time}; prints to {log}", markup=False)

    def end(self, cell: PlanCell, ended: Ended) -> None:
        """One line after it."""
        self._notes.print(f"      {ended.state} after {duration(ended.seconds)}", markup=False)


def _make(plan: Plan, notes: Console) -> dict[str, str]:
    """Tables, figures, verdicts and the report; what cannot be made is said and stops no other."""
    from repro.commands.figures import draw_figures
    from repro.commands.report_run import write_report
    from repro.commands.tables import write_tables
    from results.evidence import read_evidence
    from results.ledger import VERDICTS_FILE, as_text
    from results.verdicts import judged

    def tables() -> str:
        made = write_tables(plan.records, plan.out / "tables")
        empty = [number for number, table in made.items() if table.frame.empty]
        return f"{len(made)} in {plan.out / 'tables'}" + _without(empty)

    def figures() -> str:
        drawn = draw_figures(plan.records, plan.out / "figures")
        empty = [one.spec.number for one in drawn if one.empty]
        return f"{len(drawn)} in {plan.out / 'figures'}" + _without(empty)

    def verdicts() -> str:
        evidence = read_evidence(plan.records)
        rows = judged(evidence.runs, evidence.analyses)
        path = plan.out / VERDICTS_FILE
        path.write_text(as_text(rows), encoding="utf-8")
        given = sum(row.verdict != "not measured" for row in rows)
        return f"{given} of {len(rows)} claims have one, in {path}"

    def report() -> str:
        return str(write_report(plan.records, plan.out / "report.html"))

    steps: dict[str, Callable[[], str]] = {
        "tables": tables,
        "figures": figures,
        "verdicts": verdicts,
        "report": report,
    }
    made = {}
    for name, make in steps.items():
        notes.print(f"making {name}", style="dim")
        try:
            made[name] = make()
        except (ResultsError, UserError) as error:
            made[name] = f"failed: {error}"
    return made


def _without(empty: Sequence[str]) -> str:
    return f"; without records: {', '.join(empty)}" if empty else ""


def _overview(plan: Plan) -> RichTable:
    """One row per cell: how it ended, what it took or may take, its command."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("cell", "state", "took", "left, about", "command"):
        table.add_column(heading, overflow="fold")
    left = plan.estimate()
    for cell in plan.cells:
        ended = plan.ended(cell)
        about = left.get(cell.name)
        table.add_row(
            cell.name,
            ended.state,
            duration(ended.seconds) if ended.seconds else "",
            "" if about is None else duration(about),
            shlex.join(("repro", *plan.arguments(cell))),
        )
    return table


def _left(plan: Plan) -> str:
    """How much is to do, in seconds where a finished cell tells how fast this machine is."""
    left = plan.estimate()
    known = [seconds for seconds in left.values() if seconds is not None]
    if len(known) < len(left):
        return f"{len(left)} cells to run; no cell has finished here yet that could tell how long"
    return f"{len(left)} cells to run, about {duration(sum(known))}"
