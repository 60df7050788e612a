"""Prompts as runs of token ids, so that every method sees the same tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # reading a trace needs no torch
    from torch import Tensor

Kind = Literal["PF", "PH"]


@dataclass(frozen=True)
class Visual:
    """Rows of a segment that stand for an image or a video.

    Their ids are placeholders; what enters layer 0 are projected features. Two visuals are equal if
    they stand for the same pixels at the same place.

    Attributes:
        start: first row, counted from the segment's own start.
        features: hidden state at layer 0, ``[rows, hidden]``.
        sha256: identity of what the features were made from.
    """

    start: int
    features: Tensor = field(compare=False, repr=False)
    sha256: str

    @property
    def rows(self) -> range:
        """Rows within the segment."""
        return range(self.start, self.start + len(self.features))


@dataclass(frozen=True)
class Segment:
    """A run of token ids (paper section 2.1).

    ``PF`` segments are agent-specific (system prompt, glue), ``PH`` segments hold shared context
    and name the slot they fill (``q``, ``obs{k}``, ``out{k}``, with ``@{round}`` beyond the first
    round). A segment may be empty: an agent can answer with nothing. ``visuals`` are its images and
    videos, in order.

    Raises:
        ValueError: a PH without a slot, a PF with one, or visuals that overlap or leave the
            segment.
    """

    kind: Kind
    ids: tuple[int, ...]
    slot: str | None = None
    visuals: tuple[Visual, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "PH") != (self.slot is not None):
            raise ValueError(
                f"a PH names its slot and a PF has none: {self.kind}, slot={self.slot!r}"
            )
        ends = (0, *(visual.rows.stop for visual in self.visuals))
        starts = (*(visual.start for visual in self.visuals), len(self.ids))
        if any(start < end for start, end in zip(starts, ends, strict=True)):
            raise ValueError(f"visuals overlap or leave a segment of {len(self.ids)} rows")

    def __len__(self) -> int:
        return len(self.ids)


def pf(ids: list[int] | tuple[int, ...]) -> Segment:
    """An agent-specific segment."""
    return Segment("PF", tuple(ids))


def ph(slot: str, ids: list[int] | tuple[int, ...], visuals: tuple[Visual, ...] = ()) -> Segment:
    """A shared segment that fills ``slot``."""
    return Segment("PH", tuple(ids), slot, visuals)


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
        """Hash of the ids and of what stands behind placeholders.

        It does not depend on the segmentation, so it can be compared across methods.
        """
        digest = ids_sha256(self.ids)
        if visuals := self.visuals:
            parts = (f"{rows.start} {len(rows)} {visual.sha256}" for rows, visual in visuals)
            digest = hashlib.sha256("\n".join((digest, *parts)).encode()).hexdigest()
        return digest

    @cached_property
    def visuals(self) -> tuple[tuple[range, Visual], ...]:
        """Images and videos with the prompt rows they take."""
        return tuple(
            (range(start + visual.rows.start, start + visual.rows.stop), visual)
            for segment, start in zip(self.segments, self.starts, strict=False)
            for visual in segment.visuals
        )

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
