"""Arrival laws: when each turn of a trace is meant to arrive.

QPS counts agent requests (hops) per second everywhere, never workflows. Times are absolute seconds
from the first arrival; a harness that sleeps until them does not drift, and TTFT counts from them.
Where a law draws its gaps they are stretched by one factor so that the mean rate is exactly the one
asked for: ``n`` arrivals span ``(n - 1) / qps`` seconds.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvcmas.errors import UserError
from traces.schema import TraceWorkflow, TurnKey, turn_keys

Law = Literal["even", "poisson", "workflow", "azure"]
Times = npt.NDArray[np.float64]

_TIMESTAMP = "TIMESTAMP"


@dataclass(frozen=True)
class Arrival:
    """When a turn arrives: at ``time`` (s), or with the end of the last of the turns ``after``.

    Raises:
        ValueError: both or neither.
    """

    turn: TurnKey
    time: float | None
    after: tuple[TurnKey, ...] = ()

    def __post_init__(self) -> None:
        if (self.time is None) != bool(self.after):
            raise ValueError(f"{self.turn} needs a time or turns to wait for, not both")


def arrivals(
    workflows: Sequence[TraceWorkflow],
    law: Law,
    qps: float,
    *,
    seed: int = 0,
    recorded: Path | None = None,
) -> tuple[Arrival, ...]:
    """One arrival per turn, in the trace's order (workflow by workflow).

    ``qps=0`` is a single stream under every law: each turn comes when the one before it, across
    workflows, has finished.

    - ``even``: hop k at k/qps, whether or not the hop before it has finished.
    - ``poisson``: the same hops with exponential gaps.
    - ``workflow``: workflows come with exponential gaps at qps / hops per workflow; each later hop
      is released when the hop before it has finished. The only law that is causal under load.
    - ``azure``: the gaps of real requests, as many neighbours of the CSV file ``recorded`` as the
      trace has turns; the seed chooses where to begin.

    Raises:
        UserError: an unknown law, a rate that is no rate, no or not enough recorded arrivals, or a
            malformed file.
    """
    if law not in get_args(Law):
        raise UserError(f"unknown arrival law {law!r}; known: {', '.join(get_args(Law))}")
    if not 0 <= qps < math.inf:
        raise UserError(f"qps={qps} must be 0 (single stream) or a positive number")
    if (recorded is None) == (law == "azure"):
        needs = "needs a file of" if law == "azure" else "takes no"
        raise UserError(f"arrival law {law!r} {needs} recorded arrival times")
    turns = turn_keys(workflows)
    if qps == 0 or not turns:
        return _one_after_another(turns)
    rng = np.random.default_rng(seed)
    if law == "workflow":
        starts = stretched(_exponential(len(workflows), rng), qps * len(workflows) / len(turns))
        return tuple(
            arrival
            for workflow, start in zip(workflows, starts, strict=True)
            for arrival in _one_after_another(turn_keys([workflow]), float(start))
        )
    if recorded is not None:
        times = stretched(_window(read_timestamps(recorded), len(turns), recorded, rng), qps)
    elif law == "poisson":
        times = stretched(_exponential(len(turns), rng), qps)
    else:
        times = np.arange(len(turns)) / qps
    return tuple(Arrival(turn, float(t)) for turn, t in zip(turns, times, strict=True))


def stretched(times: Times, rate: float) -> Times:
    """Ascending ``times [n]`` moved to start at 0 and scaled to ``n - 1`` gaps of mean ``1/rate``.

    Raises:
        ValueError: two or more times, all the same.
    """
    gaps = len(times) - 1
    if gaps < 1:
        return np.zeros(len(times))
    span = times[-1] - times[0]
    if not span > 0:
        raise ValueError("arrivals at one instant have no rate")
    return (times - times[0]) / span * (gaps / rate)


def read_timestamps(path: Path) -> Times:
    """Arrival times of a CSV file with a column TIMESTAMP, in seconds from the first, ``[n]``.

    The format of the Azure LLM inference traces; further columns are ignored.

    Raises:
        UserError: no such file, no such column, or a line without a time, or with one that lies
            before the line above; names file and line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read arrival times {path}: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not a text file: {error.reason}") from error
    reader = csv.reader(io.StringIO(text, newline=""))
    stamps: list[datetime] = []
    try:
        header = next(reader, [])
        if _TIMESTAMP not in header:
            raise UserError(f"{path}:1: no column {_TIMESTAMP}")
        column = header.index(_TIMESTAMP)
        for row in filter(None, reader):
            stamps.append(_timestamp(row, column, stamps, f"{path}:{reader.line_num}"))
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: {error}") from error
    return np.array([(stamp - stamps[0]).total_seconds() for stamp in stamps])


def _timestamp(row: list[str], column: int, before: list[datetime], where: str) -> datetime:
    try:
        stamp = datetime.fromisoformat(row[column])
        backwards = bool(before) and stamp < before[-1]
    except IndexError:
        raise UserError(f"{where}: {len(row)} columns, none of them {_TIMESTAMP}") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error
    if backwards:
        raise UserError(f"{where}: {row[column]} lies before the line above")
    return stamp


def _window(times: Times, n: int, path: Path, rng: np.random.Generator) -> Times:
    """``n`` neighbours of ``times``, beginning anywhere."""
    if len(times) < n:
        raise UserError(f"{path} has {len(times)} arrivals, the trace has {n} turns")
    begin = int(rng.integers(len(times) - n + 1))
    window = times[begin : begin + n]
    if n > 1 and not window[-1] > window[0]:
        raise UserError(f"{path}: {n} arrivals from number {begin + 1} on are at one instant")
    return window


def _exponential(n: int, rng: np.random.Generator) -> Times:
    """``n`` ascending times from 0 on with exponential gaps of mean 1."""
    return np.concatenate([[0.0], rng.standard_exponential(n - 1).cumsum()]) if n else np.zeros(0)


def _one_after_another(turns: Sequence[TurnKey], start: float = 0.0) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(turn, None, (turns[i - 1],)) if i else Arrival(turn, start)
        for i, turn in enumerate(turns)
    )
