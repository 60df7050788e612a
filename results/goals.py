"""What `repro bench` measures: ratios within one run, each beside its goal, as one JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from results import render
from results.errors import ResultsError
from results.stats import Estimate, bootstrap_ci

HEADINGS = ("", "median", "95% interval", "n", "goal", "met")


class BenchRow(BaseModel):
    """One quantity, measured once per round.

    Attributes:
        values: ratios (or what the name says), one per round.
        goal: what this suite set itself for the median: at most, or with ``at_least`` no less.
        seconds: where the values are paired ratios of times, those above the line.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    values: tuple[float, ...]
    goal: float | None = None
    at_least: bool = False
    seconds: tuple[float, ...] = ()

    @classmethod
    def paired(
        cls,
        name: str,
        seconds: Sequence[float],
        base: Sequence[float],
        goal: float | None = None,
        *,
        at_least: bool = False,
    ) -> BenchRow:
        """``seconds / base``, round by round."""
        values = tuple(s / b for s, b in zip(seconds, base, strict=True))
        return cls(name=name, values=values, goal=goal, at_least=at_least, seconds=tuple(seconds))

    @property
    def estimate(self) -> Estimate:
        """Median over the rounds with its bootstrap interval; none of a single round."""
        low, high = bootstrap_ci(self.values, np.median, seed=0)
        return Estimate(statistics.median(self.values), low, high)

    @property
    def met(self) -> bool | None:
        """Whether the median meets the goal, if there is one."""
        if self.goal is None:
            return None
        value = self.estimate.value
        return value >= self.goal if self.at_least else value <= self.goal

    @property
    def cells(self) -> list[str]:
        """What a table shows, under :data:`HEADINGS`."""
        value, low, high = self.estimate
        interval = "" if np.isnan(low) else f"{low:.3g} to {high:.3g}"
        sign = ">=" if self.at_least else "<="
        goal = "" if self.goal is None else f"{sign} {self.goal:g}"
        met = {None: "", True: "yes", False: "no"}[self.met]
        return [self.name, f"{value:.3g}", interval, str(len(self.values)), goal, met]


class BenchRecord(BaseModel):
    """One bench: what ran where, its rows, and notes that its numbers need."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bench: str
    title: str
    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...] = ()
    environment: dict[str, Any]

    def to_markdown(self) -> str:
        """The table of a document."""
        rows = [row.cells for row in self.rows]
        return render.markdown(self.title, HEADINGS, rows, self.notes)


def read_bench(path: Path) -> BenchRecord:
    """The record of one bench.

    Raises:
        ResultsError: it is not there or no such record.
    """
    try:
        return BenchRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise ResultsError(f"{path} is no record of a bench: {error.errors()[0]['msg']}") from error
