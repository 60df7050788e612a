"""Progress bars and exit codes that all commands share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

T = TypeVar("T")

# Files and pipes have no width of their own; the tables fit this one.
PLAIN_WIDTH = 120
# Exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130
# Seconds that the time left is reckoned from: one sample can take a minute.
SPEED_PERIOD = 1800


def progress_bar(console: Console) -> Progress:
    """Description, bar, count, elapsed time and time left; lines where nothing can be redrawn."""
    if not console.is_terminal:
        return _ProgressLines(console=console, disable=True, speed_estimate_period=SPEED_PERIOD)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=SPEED_PERIOD,
    )


def follow(rows: Iterable[T], what: str, total: int, console: Console) -> Iterator[T]:
    """The rows, with progress while they are made."""
    with progress_bar(console) as progress:
        task = progress.add_task(what, total=total)
        for row in rows:
            progress.advance(task)
            yield row


class _ProgressLines(Progress):
    """A line when a task starts and at every tenth of it, so that a log tells where a job is."""

    def start_task(self, task_id: TaskID) -> None:
        super().start_task(task_id)
        self._tell(task_id)

    def update(self, task_id: TaskID, *args: Any, **changes: Any) -> None:
        before = self._place(task_id)
        super().update(task_id, *args, **changes)
        if self._place(task_id) != before:
            self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        before = self._place(task_id)
        super().advance(task_id, advance)
        if self._place(task_id) != before:
            self._tell(task_id)

    def _place(self, task_id: TaskID) -> tuple[str, int]:
        task = self._tasks[task_id]
        tenth = int(10 * task.completed / task.total) if task.total else 0
        return task.description, tenth

    def _tell(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        words = [f"{escape(task.description)}: {task.completed:.0f} of {task.total:.0f}"]
        if task.completed and task.elapsed is not None:
            words.append(duration(task.elapsed))
        if task.time_remaining:
            words.append(f"about {duration(task.time_remaining)} left")
        self.console.print(", ".join(words), style="dim")


def output_console() -> Console:
    """Standard output, wide enough for tables when it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
