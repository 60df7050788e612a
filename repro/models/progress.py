"""Progress displays that stay visible while third-party output is swallowed."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def byte_progress(console: Console | None) -> Progress:
    """Return a progress display that counts bytes; it shows nothing if ``console`` is None."""
    return _progress(
        console,
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )


@contextmanager
def spinner(console: Console | None, text: str) -> Iterator[None]:
    """Show ``text`` with a spinner and the elapsed time while the block runs."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with _progress(console, *columns) as progress:
        task = progress.add_task(text, total=None)
        yield
        progress.update(task, total=1, completed=1)


def _progress(console: Console | None, *columns: ProgressColumn) -> Progress:
    if console is None:
        return Progress(*columns, disable=True)
    # A console on stderr looks sys.stderr up at every write, and loading a model redirects it:
    # hold on to the stream that is there now.
    pinned = Console(file=console.file, force_terminal=console.is_terminal)
    return Progress(*columns, console=pinned, redirect_stdout=False, redirect_stderr=False)
