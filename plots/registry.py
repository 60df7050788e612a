"""All figures of the paper: what each shows, what fills it, and who draws it.

A module of this package draws from run records with ``FIGURES``, number to ``draw(runs, out)``, or
from files of `repro analyze` with ``ANALYSIS_FIGURES``, number to the name of the analysis and
``draw(files, out)``. Modules are found by their being here; ``5-emulated`` is a variant of 5. A
variant that shows something else has its title in ``TITLES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType
from typing import Final

from matplotlib.figure import Figure

import plots
from plots.style import GREY, WIDTH, save, styled
from results.comparable import split_settings
from results.errors import ResultsError
from results.evidence import Evidence
from results.records import Run
from results.schema import SERVED_MODES

Draw = Callable[[Evidence, Path], list[Path]]
DrawRuns = Callable[[Sequence[Run], Path], list[Path]]
DrawFiles = Callable[[Sequence[Path], Path], list[Path]]


@dataclass(frozen=True)
class FigureSpec:
    """One figure of the paper.

    Attributes:
        command: makes the records that it is drawn from.
        apart: every setting is drawn on a sheet of its own; else the drawer tells them apart.
    """

    number: str
    title: str
    command: str
    apart: bool = False

    @property
    def name(self) -> str:
        """Name of its files, without the suffix."""
        return f"figure{self.number}"


_SERVE: Final = "repro serve --profile cpu"
FIGURES: Final[Mapping[str, FigureSpec]] = MappingProxyType(
    {
        number: FigureSpec(number, title, command, command.startswith(_SERVE))
        for number, title, command in (
            ("2", "effective rank of bases and deltas over layers", "repro analyze ranks"),
            ("3", "error of chained and non-chained correction", "repro analyze chain"),
            ("4", "accuracy against latency", "repro accuracy --bench BENCH"),
            ("5", "median TTFT under load", _SERVE),
            ("6", "median TTFT, chained and non-chained", _SERVE),
            ("7", "rank of PF-induced deltas", "repro analyze ranks"),
            ("8", "90th percentile of TTFT under load", _SERVE),
            ("9", "90th percentile of TTFT, chained and non-chained", _SERVE),
            ("10", "median TTFT with long outputs", f"{_SERVE} --ctx 2k --long-outputs"),
            ("11", "90th percentile of TTFT, long outputs", f"{_SERVE} --ctx 2k --long-outputs"),
            ("12", "TTFT, throughput and memory in a single stream", "repro stream"),
            ("13", "effect of the ranks of base and delta", "repro stream"),
        )
    }
)


def known_figures() -> tuple[str, ...]:
    """The paper's figures in order, then variants of them that a module here draws."""
    return (*FIGURES, *sorted(set(_drawers()) - set(FIGURES)))


def draw_figure(number: str, evidence: Evidence, out: Path) -> list[Path]:
    """Draw a figure into ``out``; returns the paths of its files.

    Where several settings cannot share a sheet, the one with the most runs goes into ``out`` and
    every other one into a folder below.

    Raises:
        ResultsError: an unknown number, or nothing to draw it from.
    """
    if number not in known_figures():
        raise ResultsError(f"unknown figure {number!r}; known here: {', '.join(known_figures())}")
    draw = _drawers().get(number)
    try:
        if draw is None:
            raise ResultsError("no records yet")
        return draw(evidence, out)
    except ResultsError as error:
        command = FIGURES[number].command if number in FIGURES else "repro"
        if command in str(error):
            raise
        raise ResultsError(f"{error}; made by: {command}") from error


@dataclass(frozen=True)
class Drawn:
    """One figure: its files, and why it is empty, if it is."""

    spec: FigureSpec
    paths: tuple[Path, ...]
    empty: str | None = None


def draw_all(evidence: Evidence, out: Path) -> Iterator[Drawn]:
    """Every figure of the paper, and those variants that there are records for."""
    for number in known_figures():
        if number in FIGURES:
            yield draw_or_say(number, evidence, out)
            continue
        with suppress(ResultsError):
            base, _, variant = number.partition("-")
            of = FIGURES.get(base, FigureSpec(base, "figure", "repro --help"))
            title = _titles().get(number, f"{of.title}, {variant}")
            spec = replace(of, number=number, title=title)
            yield Drawn(spec, tuple(draw_figure(number, evidence, out)))


def draw_or_say(number: str, evidence: Evidence, out: Path) -> Drawn:
    """One figure of the paper; without records its sheet says what fills it."""
    spec = FIGURES[number]
    try:
        return Drawn(spec, tuple(draw_figure(number, evidence, out)))
    except ResultsError as error:
        return Drawn(spec, tuple(_empty(spec, str(error), out)), str(error))


def _empty(spec: FigureSpec, reason: str, out: Path) -> list[Path]:
    with styled():
        figure = Figure(figsize=(WIDTH, 1.0))
        figure.text(0.02, 0.65, f"Figure {spec.number}: {spec.title}", fontsize=8.5)
        figure.text(0.02, 0.3, reason, fontsize=7.5, color=GREY, wrap=True)
        return save(figure, out, spec.name)


@cache
def _drawers() -> Mapping[str, Draw]:
    """Who draws which figure, from all modules of this package."""
    found: dict[str, Draw] = {}
    for module in _modules():
        found |= _drawers_of(module)
    return MappingProxyType(found)


def _titles() -> dict[str, str]:
    """Titles of variants that have one of their own."""
    found: dict[str, str] = {}
    for module in _modules():
        found |= getattr(module, "TITLES", {})
    return found


def _modules() -> Iterator[ModuleType]:
    for module in iter_modules(plots.__path__):
        if module.name != "registry":
            yield import_module(f"{plots.__name__}.{module.name}")


def _drawers_of(module: ModuleType) -> dict[str, Draw]:
    of_runs: Mapping[str, DrawRuns] = getattr(module, "FIGURES", {})
    of_files: Mapping[str, tuple[str, DrawFiles]] = getattr(module, "ANALYSIS_FIGURES", {})
    return {
        **{number: _from_runs(number, draw) for number, draw in of_runs.items()},
        **{number: _from_files(*pair) for number, pair in of_files.items()},
    }


def _from_files(name: str, draw: DrawFiles) -> Draw:
    def from_files(evidence: Evidence, out: Path) -> list[Path]:
        files = [a.path for a in evidence.analysed(name) if a.path is not None]
        if not files:
            raise ResultsError("no records yet")
        return draw(files, out)

    return from_files


def _from_runs(number: str, draw: DrawRuns) -> Draw:
    def together(evidence: Evidence, out: Path) -> list[Path]:
        return draw(evidence.runs, out)

    base, _, variant = number.partition("-")
    # Cells of its own mode only: traces of another mode are no settings to tell apart.
    every = set(SERVED_MODES.values())
    modes = {variant or "real"} & every or every

    def apart(evidence: Evidence, out: Path) -> list[Path]:
        served = [run for run in evidence.runs if SERVED_MODES.get(run.info.kind) in modes]
        groups = sorted((group for _, group in split_settings(served)), key=len, reverse=True)
        paths: list[Path] = []
        reasons = ["no records yet"]
        for group in groups:
            try:
                paths += draw(group, _free(out / _folder(group[0]), paths) if paths else out)
            except ResultsError as error:  # a setting without cells for this figure
                reasons.append(str(error))
        if not paths:
            raise ResultsError(reasons[-1])
        return paths

    spec = FIGURES.get(base)
    return apart if spec is not None and spec.apart else together


def _free(folder: Path, taken: Sequence[Path]) -> Path:
    """The folder, or one beside it if figures lie there: what differs may not be in its name."""
    beside = (folder.with_name(f"{folder.name}-{n}") for n in count(2))
    used = {path.parent for path in taken}
    return next(each for each in chain((folder,), beside) if each not in used)


def _folder(run: Run) -> str:
    info = run.info
    return f"{info.model}-{info.engine}-{info.device}-{info.dtype}".replace("/", "-")
