"""Progress where nothing can be redrawn: files, pipes, logs of jobs in the background."""

from __future__ import annotations

import io
import re

from rich.console import Console

from repro.commands.console import follow, progress_bar


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=120), out


def test_a_log_gets_a_line_at_every_tenth() -> None:
    console, out = plain()
    assert list(follow(range(40), "recording [40]", 40, console)) == list(range(40))
    lines = out.getvalue().splitlines()
    told = [line.split(",")[0] for line in lines]
    assert told == [f"recording [40]: {count} of 40" for count in range(0, 41, 4)]
    assert re.fullmatch(r"recording \[40\]: 40 of 40, \d+ s", lines[-1])


def test_what_was_there_before_is_told_at_once() -> None:
    console, out = plain()
    with progress_bar(console) as progress:
        first, second = (progress.add_task(name, total=10, start=False) for name in "ab")
        assert out.getvalue() == ""
        progress.start_task(first)
        progress.update(first, completed=3)
        progress.update(first, completed=3)
        progress.start_task(second)
        progress.update(second, description="c")
        progress.advance(second)
    told = [line.split(",")[0] for line in out.getvalue().splitlines()]
    assert told == ["a: 0 of 10", "a: 3 of 10", "b: 0 of 10", "c: 0 of 10", "c: 1 of 10"]


def test_a_terminal_gets_bars() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    assert list(follow(range(3), "recording", 3, console)) == [0, 1, 2]
    assert "━" in out.getvalue() and "3 of 3" not in out.getvalue()
