"""The row of a turn of a single stream."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from results.schema import ExecutedTurn
from results.stream_schema import MemoryBytes, PeakBytes, Work


class StreamRecord(ExecutedTurn):
    """One turn of a single stream; ``e2e_s`` is the sum of ``times_s``."""

    kind: Literal["stream"] = "stream"
    ttft_s: PositiveFloat
    output_tokens: PositiveInt
    """Tokens fed one by one, as decoding does; the same for every method."""
    row_layers: NonNegativeInt
    """Prompt rows times the layers that executed them, written to the buffer or not."""
    work: tuple[Work, ...]
    """Phases before the first token, one after another."""
    memory: MemoryBytes
    peak: PeakBytes
