"""Tables made from run records and from nothing else: registry, specification, finished table.

A module that adds a table decorates a function from runs to a frame with :func:`register`; the
package imports these modules itself, so that the registry is complete whoever asks. Runs that
differ in model, hardware, backend, dtype or data never reach one call of that function together:
they are split (:mod:`results.comparable`) and told apart by a ``setting`` column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd

from results import render
from results.analysis import Analysis
from results.comparable import refuse_copies, split_analyses, split_settings
from results.errors import TableError
from results.records import Run
from results.schema import RunInfo

Build = Callable[[Sequence[Run]], pd.DataFrame]
BuildAnalyses = Callable[[Sequence[Analysis]], pd.DataFrame]
Footer = Callable[[Sequence[Run]], tuple[str, ...]]


@dataclass(frozen=True)
class Column:
    """One column: its name in the frame and files, and how a person reads it.

    With ``interval`` the frame also holds ``<name>_low`` and ``<name>_high``. ``scale`` and
    ``digits`` apply to the display only; files keep the full value in the unit of the name.
    """

    name: str
    heading: str
    dtype: Literal["string", "Int64", "Float64"] = "Float64"
    digits: int | None = None
    scale: float = 1.0
    interval: bool = False
    hide_if_empty: bool = False

    @property
    def frame_names(self) -> tuple[str, ...]:
        """Names of the frame's columns behind this one."""
        bounds = (f"{self.name}_low", f"{self.name}_high") if self.interval else ()
        return (self.name, *bounds)

    def show(self, row: pd.Series) -> str:
        """Format this column's cell; an absent value is an empty cell, never a zero."""
        texts = ["" if pd.isna(row[name]) else self._format(row[name]) for name in self.frame_names]
        if len(texts) == 3 and all(texts):
            return f"{texts[0]} [{texts[1]}, {texts[2]}]"
        return texts[0]

    def _format(self, value: str | float) -> str:
        if isinstance(value, str) or self.digits is None:
            return str(value)
        return f"{value * self.scale:.{self.digits}f}"


SETTING = Column("setting", "Setting", dtype="string")


def provenance(runs: Sequence[Run]) -> tuple[str, ...]:
    """Footer with what is needed to judge or repeat the numbers; generated data are named first."""
    infos = [run.info for run in runs]
    lines = []
    if any(info.data == "procedural" for info in infos):
        lines.append(
            "data=procedural: generated problems, NOT the benchmark's own; do not compare scores"
        )
    lines += [
        "; ".join(
            f"{name}: {', '.join(sorted({str(value(info)) for info in infos}))}"
            for name, value in parts.items()
        )
        for parts in _PROVENANCE
    ]
    lines[-1] += f"; runs: {len(runs)}"
    lines += [
        f"incomplete: run {run.info.run_key} has {len(run.samples)} of {run.info.n} samples"
        for run in runs
        if len(run.samples) < run.info.n and not run.out_of_memory
    ]
    return tuple(lines)


# One dict is one line of the footer.
_PROVENANCE: tuple[Mapping[str, Callable[[RunInfo], object]], ...] = (
    {
        "model": lambda info: f"{info.model}@{info.model_revision or 'unversioned'}",
        "dtype": lambda info: info.dtype,
        "engine": lambda info: info.engine,
        "attention": lambda info: info.attention,
    },
    {"hardware": lambda info: f"{info.hardware} ({info.device})"},
    {"data": lambda info: f"{info.bench} {info.data} sha256 {info.data_sha256[:12]}"},
    {
        "profile": lambda info: info.profile,
        "n": lambda info: info.n,
        "seeds": lambda info: info.seed,
        "max new tokens": lambda info: info.max_new_tokens,
        "workflow": lambda info: info.workflow,
    },
    {"git commit": lambda info: info.git_commit or "unknown"},
)


@dataclass(frozen=True)
class Spec:
    """What every table has."""

    number: str
    title: str
    columns: tuple[Column, ...]
    command: str
    """Command that makes its records; shown while there are none."""

    @property
    def nothing(self) -> tuple[str, ...]:
        """Footer of the empty table."""
        return (f"no records yet; made by: {self.command}",)


@dataclass(frozen=True)
class AnalysisSpec(Spec):
    """How a table is made from files of `repro analyze`."""

    analysis: str
    build: BuildAnalyses

    def table(self, analyses: Sequence[Analysis]) -> Table:
        """The table, one group of rows per setting, from the analyses of its name."""
        chosen = [analysis for analysis in analyses if analysis.name == self.analysis]
        groups = list(split_analyses(chosen))
        columns = (SETTING, *self.columns) if len(groups) > 1 else self.columns
        frames = [self.build(group).assign(setting=setting) for setting, group in groups]
        frame = _frame(columns, frames)
        return Table(self, columns, frame, _provenance_of(chosen) if chosen else self.nothing)


@dataclass(frozen=True)
class TableSpec(Spec):
    """How a table is made from run records."""

    kinds: tuple[str, ...]
    """Kinds of run it is made from."""
    build: Build
    footer: Footer = provenance
    header: Footer | None = None
    """Lines that a reader needs before the first number, for instance that lengths are scaled."""
    beside: tuple[str, ...] = ()
    """Kinds of run that every group is given as well, whatever their setting: to look up what
    another model or benchmark says about the same variant. The footer has to name them."""

    def table(self, runs: Sequence[Run]) -> Table:
        """The table, one group of rows per setting, from the runs of its kinds."""
        others = [run for run in runs if run.info.kind in self.beside]
        chosen = [run for run in runs if run.info.kind in self.kinds]
        refuse_copies(chosen)
        built = [(group, self.build([*group, *others])) for _, group in split_settings(chosen)]
        # A setting without a row needs no telling apart from the others.
        filled = [(group, frame) for group, frame in built if len(frame)]
        groups = list(split_settings([run for group, _ in filled for run in group]))
        labels = {run.info.run_key: label for label, group in groups for run in group}
        columns = (SETTING, *self.columns) if any(labels.values()) else self.columns
        frames = [frame.assign(setting=labels[group[0].info.run_key]) for group, frame in filled]
        frame = _frame(columns, frames)
        footer = self.footer([*chosen, *others]) if chosen else self.nothing
        header = self.header(chosen) if self.header is not None and len(frame) else ()
        return Table(self, columns, frame, footer, header)


@dataclass(frozen=True)
class Table:
    """A finished table. ``frame`` holds the values in full; everything else is a view of it."""

    spec: Spec
    columns: tuple[Column, ...]
    frame: pd.DataFrame
    footer: tuple[str, ...]
    header: tuple[str, ...] = ()

    def shown(self, names: Sequence[str] | None = None) -> tuple[Column, ...]:
        """Columns to display: those named, in this order, or all but the empty optional ones."""
        if names is None:
            return tuple(
                column
                for column in self.columns
                if not (column.hide_if_empty and self._empty(column.name))
            )
        by_name = {column.name: column for column in self.columns}
        if unknown := [name for name in names if name not in by_name]:
            raise TableError(f"table {self.spec.number} has no column {', '.join(unknown)}")
        return tuple(by_name[name] for name in names)

    def headings(self, names: Sequence[str] | None = None) -> list[str]:
        """Column headings, units included."""
        return [column.heading for column in self.shown(names)]

    def display_rows(self, names: Sequence[str] | None = None) -> list[list[str]]:
        """Cells as a person reads them, for instance "62.5 [30.6, 86.3]"; empty if not measured."""
        columns = self.shown(names)
        return [[column.show(row) for column in columns] for _, row in self.frame.iterrows()]

    def to_csv(self, path: Path) -> None:
        """Write the full values below title and footer, which are lines that start with ``# ``.

        ``pandas.read_csv(path, comment="#")`` reads it.
        """
        lines = (self._caption, *self.header, *self.footer)
        head = "".join(f"# {line}\n" for line in lines)
        # Twelve digits: the last ones of a sum depend on the machine, and files are compared.
        body = self.frame.to_csv(index=False, float_format="%.12g", lineterminator="\n")
        path.write_text(head + body, encoding="utf-8")

    def to_parquet(self, path: Path) -> None:
        """Write the full values; ``pandas.read_parquet`` returns title and footer in ``attrs``."""
        frame = self.frame.copy(deep=False)
        frame.attrs = {"title": self._caption, "footer": [*self.header, *self.footer]}
        frame.to_parquet(path, index=False)

    def to_markdown(self) -> str:
        """Render the displayed cells as a Markdown table with its footer."""
        return render.markdown(
            self._full_caption, self.headings(), self.display_rows(), self.footer
        )

    def to_latex(self) -> str:
        """Render the displayed cells as a LaTeX table float (booktabs) with its footer."""
        return render.latex(self._full_caption, self.headings(), self.display_rows(), self.footer)

    def _empty(self, name: str) -> bool:
        return all(pd.isna(value) or value == "" for value in self.frame[name])

    @property
    def _full_caption(self) -> str:
        return " ".join((f"{self._caption}.", *self.header)) if self.header else self._caption

    @property
    def _caption(self) -> str:
        return f"Table {self.spec.number}: {self.spec.title}"


_REGISTRY: dict[
    str, TableSpec | AnalysisSpec
] = {}  # filled while the package is imported, never after


def register(
    number: str,
    *,
    title: str,
    columns: Iterable[Column],
    kinds: Iterable[str],
    command: str,
    footer: Footer = provenance,
    header: Footer | None = None,
    beside: Iterable[str] = (),
) -> Callable[[Build], Build]:
    """Declare a function from comparable runs to a frame as the way table ``number`` is made.

    The frame holds every column of ``columns``. Raises TableError if the number is taken.
    """

    def add(build: Build) -> Build:
        parts = (tuple(kinds), build, footer, header, tuple(beside))
        _add(TableSpec(number, title, tuple(columns), command, *parts))
        return build

    return add


def register_analysis(
    number: str, *, title: str, columns: Iterable[Column], analysis: str, command: str
) -> Callable[[BuildAnalyses], BuildAnalyses]:
    """The same for a table that is made from comparable analyses of the name ``analysis``."""

    def add(build: BuildAnalyses) -> BuildAnalyses:
        _add(AnalysisSpec(number, title, tuple(columns), command, analysis, build))
        return build

    return add


def _add(spec: TableSpec | AnalysisSpec) -> None:
    if spec.number in _REGISTRY:
        raise TableError(f"table {spec.number} is registered twice")
    _REGISTRY[spec.number] = spec


def known_tables() -> tuple[str, ...]:
    """Numbers of the registered tables, in order."""
    return tuple(sorted(_REGISTRY, key=lambda number: (len(number), number)))


def build_table(number: str, runs: Sequence[Run], analyses: Sequence[Analysis] = ()) -> Table:
    """Make a table from the records of its kinds; others are ignored, none gives an empty table.

    Raises TableError for an unknown number and for runs that claim the same cell.
    """
    if number not in _REGISTRY:
        raise TableError(f"unknown table {number!r}; known: {', '.join(known_tables())}")
    spec = _REGISTRY[number]
    return spec.table(runs) if isinstance(spec, TableSpec) else spec.table(analyses)


def _frame(columns: Sequence[Column], frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The columns of all frames, one after another, with their types."""
    types = {name: column.dtype for column in columns for name in column.frame_names}
    if not frames:
        return pd.DataFrame(columns=list(types)).astype(types)
    return pd.concat([f[list(types)].astype(types) for f in frames], ignore_index=True)


def _provenance_of(analyses: Sequence[Analysis]) -> tuple[str, ...]:
    """Footer of a table made from analyses: what they are from, their definitions."""
    lines = [
        "; ".join(
            f"{name}: {', '.join(sorted({a.provenance.get(name, '') for a in analyses}))}"
            for name in names
        )
        for names in (("model", "dtype"), ("device",), ("bench", "data", "n", "workflow"))
    ]
    commits = sorted({analysis.provenance.get("git_commit", "unknown") for analysis in analyses})
    lines.append(f"git commit: {', '.join(commits)}")
    return (*lines, *dict.fromkeys(note for analysis in analyses for note in analysis.notes))
