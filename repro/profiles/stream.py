"""The part of a profile that `repro stream` reads."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from repro.models.loading import DType
from repro.profiles.cells import CellSpec


class StreamShape(BaseModel):
    """One shape of workflow on one model.

    Attributes:
        ctx: tokens of the shared span, as ``32k``.
        scale: divides every length.
        load: ``dummy`` takes random weights of the model's published shape.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    ctx: str
    scale: PositiveFloat = 1.0
    load: Literal["weights", "dummy"] = "weights"


class StreamPart(BaseModel):
    """One sweep: every cell at every shape, number of agents and rounds.

    Attributes:
        study: takes the cells of a shipped study instead of ``cells``.
        workflows: measured ones of a cell; 5 give a ratio of 0.8 or 0.6 exactly.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: tuple[StreamShape, ...] = Field(min_length=1)
    agents: tuple[PositiveInt, ...] = (3,)
    rounds: tuple[PositiveInt, ...] = (1,)
    workflows: PositiveInt = 5
    cells: tuple[CellSpec, ...] = ()
    study: str | None = None

    @model_validator(mode="after")
    def _cells_or_study(self) -> StreamPart:
        if bool(self.cells) == (self.study is not None):
            raise ValueError("a part has cells, or the name of a study")
        return self


class StreamProfile(BaseModel):
    """Defaults of `repro stream`.

    Attributes:
        outputs: tokens that each turn generates, before scaling.
        memory_limit: a cell that needs more is out of memory; None: what the device has.
        parts: sweeps by name, in the order in which they are run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: DType = "auto"
    device: str = "auto"
    layout: Literal["T", "L0"] = "T"
    outputs: PositiveInt = 128
    seed: NonNegativeInt = 0
    memory_limit: str | None = None
    parts: dict[str, StreamPart] = Field(min_length=1)
