"""The clock of a cell: busy time is always measured; idle time is waited for or skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from kvcmas.errors import UserError

ClockKind = Literal["virtual", "wall"]


class Clock:
    """Seconds since the cell began, without what is excluded.

    Both kinds measure busy time with ``source``. They differ in :meth:`idle_until` alone: ``wall``
    sleeps, ``virtual`` jumps, so that a cell of low rate does not sit idle. While nothing is idle
    they are the same clock.

    Args:
        source: monotonic seconds.
        sleep: called by the wall clock with the seconds to wait.

    Raises:
        UserError: an unknown kind.
    """

    def __init__(
        self,
        kind: ClockKind,
        *,
        source: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if kind not in get_args(ClockKind):
            raise UserError(f"unknown clock {kind!r}; known: {', '.join(get_args(ClockKind))}")
        self.kind = kind
        self.source = source
        self._sleep = sleep
        self._origin = source()
        self._skipped = 0.0
        self.excluded = 0.0

    def now(self) -> float:
        """Seconds of this cell."""
        return self.source() - self._origin - self.excluded + self._skipped

    def idle_until(self, when: float) -> None:
        """Nothing is to be done before ``when``; does not go back."""
        while (gap := when - self.now()) > 0:
            if self.kind == "virtual":
                self._skipped += gap
                return
            self._sleep(gap)

    def exclude(self, seconds: float) -> None:
        """Take back time that was spent outside the serving path (captures, book-keeping)."""
        self.excluded += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time does not pass inside the block."""
        start = self.source()
        try:
            yield
        finally:
            self.exclude(self.source() - start)
