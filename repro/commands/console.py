"""Progress bars and exit codes that all commands share."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Files and pipes have no width of their own; the tables fit this one.
PLAIN_WIDTH = 120
# Exit code after Ctrl-C, as shells have it.
INTERRUPTED = 130


def progress_bar(console: Console) -> Progress:
    """Description, bar, count, elapsed time and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


def output_console() -> Console:
    """Standard output, wide enough for tables when it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
