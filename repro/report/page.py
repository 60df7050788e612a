"""Fills the page: what a reader sees of claims, tables, figures and records."""

from __future__ import annotations

import base64
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined, Template
from markdown_it import MarkdownIt
from markupsafe import Markup

from plots.registry import draw_all
from repro.commands.console import duration
from repro.commands.tables import make_tables
from results.claims import LedgerRow, PaperValue
from results.evidence import Evidence, digest
from results.folders import folders
from results.tables import Table
from results.verdicts import judged

_SYMBOLS: Final[Mapping[str, str]] = {
    "equal": "",
    "about": "about ",
    "below": "< ",
    "above": "> ",
    "at_most": "at most ",
    "at_least": "at least ",
}
# Best first; the page counts them in this order.
_VERDICTS: Final = ("agrees", "agrees in direction", "disagrees", "not measured")


@dataclass(frozen=True)
class ClaimView:
    """One row of the ledger as the page shows it."""

    row: LedgerRow
    paper: tuple[str, ...]
    records: tuple[str, ...]
    """Key and place of each record behind the verdict."""

    @property
    def css(self) -> str:
        """Class of the verdict's badge."""
        return self.row.verdict.replace(" ", "-")


@dataclass(frozen=True)
class TableView:
    """One table: its cells as text, and what it says about itself."""

    number: str
    title: str
    command: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, table: Table) -> TableView:
        """The displayed cells of a finished table."""
        return cls(
            table.spec.number,
            table.spec.title,
            table.spec.command,
            tuple(table.headings()),
            tuple(map(tuple, table.display_rows())),
            (*table.header, *table.footer),
        )


@dataclass(frozen=True)
class FigureView:
    """One figure as data URIs, one per sheet; ``empty`` says why there is none."""

    number: str
    title: str
    command: str
    sheets: tuple[str, ...]
    empty: str | None


def report_page(evidence: Evidence, root: Path) -> str:
    """The whole page for the records below ``root``, as HTML that loads nothing else.

    Raises:
        ResultsError: records that cannot share a table.
    """
    rows = judged(evidence.runs, evidence.analyses)
    counts = Counter(row.verdict for row in rows)
    tables = [TableView.of(table) for table in make_tables(evidence).values()]
    return _template().render(
        claims=[_claim(row, evidence, root) for row in rows],
        counts=[(verdict, counts[verdict]) for verdict in _VERDICTS],
        tables=tables,
        figures=_figures(evidence),
        folders=folders(evidence, root),
        machines=_machines(evidence),
        records=digest(root) if root.is_dir() else "",
        limits=_markdown("limits.md"),
        differences=_markdown("differences.md"),
    )


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["duration"] = duration
    return environment.from_string(_packaged("page.html"))


def _packaged(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _markdown(name: str) -> Markup:
    """A page of this package as HTML."""
    return Markup(MarkdownIt("commonmark").enable("table").render(_packaged(name)))


def _claim(row: LedgerRow, evidence: Evidence, root: Path) -> ClaimView:
    places = ((key, evidence.where(key)) for key in row.runs)
    return ClaimView(
        row,
        tuple(map(_stated, row.claim.paper_values)),
        tuple(
            key if place is None else f"{key} {place.relative_to(root).as_posix()}"
            for key, place in places
        ),
    )


def _stated(value: PaperValue) -> str:
    """One number of the paper with its relation and unit."""
    if value.value is None:
        return f"{value.quantity}: {value.low:g} to {value.high:g} {value.unit}"
    return f"{value.quantity}: {_SYMBOLS[value.relation]}{value.value:g} {value.unit}"


def _figures(evidence: Evidence) -> list[FigureView]:
    with tempfile.TemporaryDirectory() as name:
        return [
            FigureView(
                drawn.spec.number,
                drawn.spec.title,
                drawn.spec.command,
                () if drawn.empty else tuple(_uri(p) for p in drawn.paths if p.suffix == ".svg"),
                drawn.empty,
            )
            for drawn in draw_all(evidence, Path(name))
        ]


def _uri(svg: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode()}"


def _machines(evidence: Evidence) -> list[tuple[str, Sequence[str]]]:
    """Hardware, models, packages and commits of all records: what it was run on and with."""
    infos = [run.info for run in evidence.runs]
    packages = {
        f"{name} {version}"
        for info in infos
        if isinstance(found := info.environment.get("packages"), dict)
        for name, version in found.items()
        if version
    }
    values = {
        "hardware": {f"{info.hardware} ({info.device})" for info in infos},
        "models": {
            f"{info.model}@{(info.model_revision or '')[:12]}, {info.dtype}" for info in infos
        },
        "engines": {f"{info.engine}, attention {info.attention}" for info in infos},
        "packages": packages,
        "git commits": {info.git_commit or "unknown" for info in infos},
    }
    return [(name, sorted(found)) for name, found in values.items()]
