"""Prompts as runs of token ids, so that every method sees the same tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

Kind = Literal["PF", "PH"]


@dataclass(frozen=True)
class Segment:
    """A run of token ids (paper section 2.1).

    ``PF`` segments are agent-specific (system prompt, glue), ``PH`` segments hold shared context
    and name the slot they fill (``q``, ``obs{k}``, ``out{k}``, with ``@{round}`` beyond the first
    round). A segment may be empty: an agent can answer with nothing.

    Raises:
        ValueError: a PH without a slot, or a PF with one.
    """

    kind: Kind
    ids: tuple[int, ...]
    slot: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "PH") != (self.slot is not None):
            raise ValueError(
                f"a PH names its slot and a PF has none: {self.kind}, slot={self.slot!r}"
            )

    def __len__(self) -> int:
        return len(self.ids)


def pf(ids: list[int] | tuple[int, ...]) -> Segment:
    """An agent-specific segment."""
    return Segment("PF", tuple(ids))


def ph(slot: str, ids: list[int] | tuple[int, ...]) -> Segment:
    """A shared segment that fills ``slot``."""
    return Segment("PH", tuple(ids), slot)


@dataclass(frozen=True)
class Prompt:
    """Segments joined in order; never re-tokenised.

    Raises:
        ValueError: the prompt has no token (there would be no row to predict from).
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not any(self.segments):
            raise ValueError("a prompt needs at least one token")

    def __len__(self) -> int:
        return self.starts[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each segment, and the prompt's length as the last element."""
        return (0, *accumulate(len(segment) for segment in self.segments))

    @cached_property
    def ids(self) -> list[int]:
        """All token ids, ``[tokens]``."""
        return [token for segment in self.segments for token in segment.ids]

    @cached_property
    def sha256(self) -> str:
        """Hash of the ids alone, so that it can be compared across methods and segmentations."""
        return ids_sha256(self.ids)

    def rows(self, index: int) -> range:
        """Rows (absolute positions) of segment ``index``."""
        return range(self.starts[index], self.starts[index + 1])

    def slot(self, index: int) -> str:
        """Slot of a PH segment.

        Raises:
            ValueError: the segment is not shared.
        """
        slot = self.segments[index].slot
        if slot is None:
            raise ValueError(f"segment {index} is not shared")
        return slot

    def shared(self) -> Iterator[int]:
        """Indices of the non-empty PH segments, in prompt order."""
        return (i for i, s in enumerate(self.segments) if s.kind == "PH" and len(s))


def ids_sha256(ids: list[int] | tuple[int, ...]) -> str:
    """Hex sha256 of token ids as little-endian 64-bit integers."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()
