"""A whole profile as cells: each is one command of this suite in a process of its own.

A process per cell, so that one that runs out of memory or crashes takes nothing else with it, gives
its memory back, and writes its own command into its records. What a cell has finished inside stays
when it is interrupted; given again, it goes on from there.

Below the output folder, ``state/NAME.json`` says how a cell ended and how long it took,
``state/NAME.log`` holds what it printed, and ``state/NAME.failed`` why it failed.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, PositiveFloat

State = Literal["missing", "done", "failed", "interrupted"]

# Last lines of a failed cell's log that its failure file repeats.
_TAIL: Final = 40
# Seconds that an interrupted cell gets to write what it has.
_PATIENCE_S: Final = 60.0
REPRO: Final = (sys.executable, "-m", "repro")


class PlanCell(BaseModel):
    """One command of a plan.

    Attributes:
        command: of this suite, without profile and folder, which are the plan's.
        weight: about how long it takes, against the plan's other cells.
        out: folder of its records; cells that share one share recorded traces. Its name if None.
        profiled: the command takes a profile; calculations do not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    command: str
    weight: PositiveFloat
    out: str | None = None
    profiled: bool = True

    def arguments(self, profile: str, records: Path, data: Path | None = None) -> tuple[str, ...]:
        """The command line behind ``repro``; ``data`` holds folders named like benchmarks."""
        words = shlex.split(self.command)
        if data is not None and "--bench" in words and "--data" not in words:
            own = data / words[words.index("--bench") + 1]
            words += ["--data", str(own)] if own.exists() else []
        folder = records / (self.out or self.name)
        words += ["--profile", profile] if self.profiled else []
        return (*words, "--out", str(folder))


@dataclass(frozen=True)
class Ended:
    """How a cell ended, and the seconds that all its starts took together."""

    state: State
    seconds: float = 0.0
    code: int | None = None


class Interrupted(Exception):
    """Ctrl-C; the cell that was running has ended."""


def load_plan(profile: str) -> tuple[PlanCell, ...]:
    """The cells of a shipped profile, in the order in which they are run."""
    folder = resources.files("repro.profiles") / "plans"
    cells = yaml.safe_load((folder / f"{profile}.yaml").read_text(encoding="utf-8"))
    return tuple(PlanCell.model_validate(cell) for cell in cells)


@dataclass(frozen=True)
class Plan:
    """The cells of a profile in one output folder.

    Attributes:
        program: what runs a cell's arguments.
        data: folder with one folder of files per benchmark, for those that have one.
    """

    profile: str
    cells: tuple[PlanCell, ...]
    out: Path
    program: tuple[str, ...] = REPRO
    data: Path | None = None

    @property
    def records(self) -> Path:
        """Folder of all records."""
        return self.out / "runs"

    def arguments(self, cell: PlanCell) -> tuple[str, ...]:
        """The cell's command line behind ``repro``."""
        return cell.arguments(self.profile, self.records, self.data)

    def log(self, cell: PlanCell) -> Path:
        """What the cell printed."""
        return self._file(cell, "log")

    def failure(self, cell: PlanCell) -> Path:
        """Why it failed; not there if it did not."""
        return self._file(cell, "failed")

    def ended(self, cell: PlanCell) -> Ended:
        """How the cell ended the last time; missing if it never began, or as another command."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._file(cell, "json").read_text(encoding="utf-8"))
            if tuple(known.pop("arguments")) == self.arguments(cell):
                return Ended(**known)
        return Ended("missing")

    def estimate(self) -> dict[str, float | None]:
        """Seconds that each cell that is not done still takes, by name.

        From the cells that are done and the plan's weights; None before one is.
        """
        ended = {cell: self.ended(cell) for cell in self.cells}
        done = [cell for cell in self.cells if ended[cell].state == "done"]
        rate = (
            sum(ended[cell].seconds for cell in done) / sum(cell.weight for cell in done)
            if done
            else None
        )
        return {
            cell.name: None if rate is None else max(0.0, rate * cell.weight - ended[cell].seconds)
            for cell in self.cells
            if cell not in done
        }

    def run(self, cell: PlanCell) -> Ended:
        """Run one cell to its end and write down how it ended.

        Raises:
            Interrupted: Ctrl-C. The cell was told, and given time to write what it has.
        """
        self.failure(cell).parent.mkdir(parents=True, exist_ok=True)
        self.failure(cell).unlink(missing_ok=True)
        before, start = self.ended(cell).seconds, time.monotonic()
        with self.log(cell).open("ab") as log:
            # A session of its own: a Ctrl-C at the terminal reaches the cell once, from here.
            process = subprocess.Popen(
                [*self.program, *self.arguments(cell)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait()
            except KeyboardInterrupt:
                _stop(process)
                self._write(cell, Ended("interrupted", before + time.monotonic() - start))
                raise Interrupted from None
        ended = Ended("failed" if code else "done", before + time.monotonic() - start, code)
        self._write(cell, ended)
        if code:
            self.failure(cell).write_text(self._why(cell, code), encoding="utf-8")
        return ended

    def run_all(
        self, begin: Callable[[PlanCell], None], end: Callable[[PlanCell, Ended], None]
    ) -> None:
        """Run what is not done, one cell after another; a failed cell stops no other.

        Raises:
            Interrupted: Ctrl-C.
        """
        for cell in self.cells:
            if self.ended(cell).state != "done":
                begin(cell)
                end(cell, self.run(cell))

    def _write(self, cell: PlanCell, ended: Ended) -> None:
        content: dict[str, Any] = {"arguments": self.arguments(cell), **asdict(ended)}
        self._file(cell, "json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _why(self, cell: PlanCell, code: int) -> str:
        with self.log(cell).open(encoding="utf-8", errors="replace") as log:
            tail = "".join(deque(log, maxlen=_TAIL))
        return (
            f"{shlex.join(('repro', *self.arguments(cell)))}\nended with {_ending(code)}\n\n{tail}"
        )

    def _file(self, cell: PlanCell, suffix: str) -> Path:
        return self.out / "state" / f"{cell.name}.{suffix}"


def chosen(cells: Sequence[PlanCell], names: Sequence[str]) -> tuple[PlanCell, ...]:
    """The cells with these names, in the plan's order; all without names.

    Raises ValueError naming one that is not there.
    """
    known = {cell.name for cell in cells}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no cell {unknown[0]!r}; known: {', '.join(cell.name for cell in cells)}")
    return tuple(cell for cell in cells if not names or cell.name in names)


def _ending(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a cell as Ctrl-C does; end it if it does not listen."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_PATIENCE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
