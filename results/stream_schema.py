"""Runs of kind ``stream``: the cell of a single stream, and one turn of it.

A single stream is one workflow after another, each turn prefilled, learned from and decoded before
the next begins. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Rates(_Data):
    """What the machine did in the same run, as the yardstick of the roofline."""

    flops_per_s: PositiveFloat
    """Of one product of the model's own size: prompt rows by its MLP."""
    bytes_per_s: PositiveFloat
    """Of copying one layer's K and V; bytes read and bytes written both count."""


class StreamInfo(_Data):
    """The cell of a single stream: one method on one shape of workflow."""

    layout: Literal["T", "L0"]
    shared_tokens: PositiveInt
    output_tokens: PositiveInt
    """Tokens of the shared span and of each output, before ``scale`` divides them."""
    agents: PositiveInt
    rounds: PositiveInt
    scale: PositiveFloat
    load: Literal["weights", "dummy"]
    """The model's weights, or random ones of its published shape."""
    positions: PositiveInt
    """Longest context of a turn."""
    model_positions: PositiveInt
    """Longest context that the model was made for; ids are random, so only cost is measured."""
    rho_kind: Literal["none", "all", "controlled", "budget"]
    """Nothing is reused; everything; a schedule of dense transitions; a share recomputed."""
    rho: Annotated[float, Field(ge=0, le=1)] | None
    """What the method was set to; None where its own settings decide."""
    schedule: dict[str, JsonValue]
    work_bound: PositiveFloat | None
    """Speed-up over NonShared if prompt tokens were all that costs."""
    pool_entries: NonNegativeInt
    """Stored parts when a workflow began."""
    pool_copies: NonNegativeInt
    """Anchors of each slot then, all with the content of one workflow."""
    warm_up_requests: NonNegativeInt
    """Agent requests of this shape that were run before and discarded."""
    rates: Rates | None
    """None if nothing was run."""
    memory_needed_bytes: NonNegativeInt
    """Calculated before: weights, live caches, full pools and one anchor in the making."""
    memory_limit_bytes: PositiveInt
    out_of_memory: bool = False
    """More is needed than the limit, so nothing was run; or within it the device had no more."""


class MemoryBytes(_Data):
    """Bytes of the objects that there were when a turn had ended, its own buffer included."""

    weights: NonNegativeInt
    active: NonNegativeInt
    """K and V of the turn's buffer with what is captured beside them."""
    sources: NonNegativeInt
    pool_base: NonNegativeInt
    pool_delta: NonNegativeInt
    """Deltas, and what a PF policy stores."""
    references: NonNegativeInt
    transient: NonNegativeInt | None
    """Most that learning from one turn held beyond what it left, as the warm-up's last turn had it;
    None where nobody learns."""

    @property
    def held(self) -> int:
        """All but ``transient``."""
        pool = self.pool_base + self.pool_delta
        return self.weights + self.active + self.sources + pool + self.references


class PeakBytes(_Data):
    """Most memory of a turn, as the system has it; None where it has no such number."""

    resident: NonNegativeInt | None = None
    """Of the process, on a CPU."""
    allocated: NonNegativeInt | None = None
    reserved: NonNegativeInt | None = None
    """By PyTorch on CUDA: live tensors, and what its allocator keeps."""
    driver: NonNegativeInt | None = None
    """On the whole device when the turn ended."""


class Work(_Data):
    """What one phase of a turn's first token computed and moved."""

    phase: Literal["model", "fills", "reference"]
    flops: NonNegativeFloat
    moved_bytes: NonNegativeFloat
