"""A run's time limit: what was finished by then is kept, and the next run goes on from there."""

from __future__ import annotations

from time import monotonic


class TimeIsUp(Exception):
    """A run's time limit was reached; the message says where it was."""


class Deadline:
    """Counts from when it is made.

    Args:
        minutes: the limit; None or 0 is none.
    """

    def __init__(self, minutes: float | None) -> None:
        self._minutes = minutes or None
        self._start = monotonic()

    def check(self, done: int, total: int, what: str) -> None:
        """Called after each piece of work, so that every run gets one done.

        Raises:
            TimeIsUp: the limit is reached and something is left to do.
        """
        if self._minutes is None or done >= total:
            return
        if monotonic() - self._start >= 60 * self._minutes:
            raise TimeIsUp(f"time limit of {self._minutes:g} min: {done} of {total} {what}")
