"""The part of a profile that `repro serve` reads."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from repro.models.loading import DType

Law = Literal["even", "poisson", "workflow", "azure"]


class ServeMethod(BaseModel):
    """One method of a serving study, with the settings that make it a variant."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    settings: dict[str, Any] = Field(default_factory=dict)


class ServeContext(BaseModel):
    """What one context does differently; None leaves the profile's value."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scale: PositiveFloat | None = None
    pool: NonNegativeInt | None = None
    arrival: dict[Law, tuple[NonNegativeFloat, ...]] | None = None
    methods: tuple[str, ...] | None = None


class ServeProfile(BaseModel):
    """Defaults of `repro serve`.

    Attributes:
        engine: ``auto`` is vLLM where it is installed, else the Transformers engine.
        ctx: contexts that are served where none is named; keys of ``contexts`` are written alike.
        arrival: rates (agent requests per second, 0 for a single stream) of each arrival law.
        selective_rho: ratio of selective methods by that of delta methods (paper B.4).
        requests: agent requests of a cell, a multiple of ``agents``.
        repeats: cells of the same load, with other seeds of arrivals and schedules.
        pool: workflows that fill warm pools; 0 starts every cell with empty ones.
        time_scale: ``auto`` keeps the paper's ratio of rate and capacity; 1 is the raw rate.
        cell_limit_s: seconds of a cell's clock after which it gives up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    dtype: DType = "auto"
    device: str = "auto"
    engine: Literal["auto", "vllm", "hf"] = "auto"
    layout: Literal["T", "L0"] = "T"
    ctx: tuple[str, ...] = ("2k",)
    outputs: tuple[PositiveInt, ...] = (128,)
    agents: PositiveInt = 4
    scale: PositiveFloat = 1.0
    arrival: dict[Law, tuple[NonNegativeFloat, ...]]
    rho: tuple[float, ...] = (0.8,)
    selective_rho: dict[float, float] = Field(default_factory=lambda: {0.8: 0.9, 0.6: 0.8})
    requests: PositiveInt
    repeats: PositiveInt = 1
    seed: NonNegativeInt = 0
    pool: NonNegativeInt
    clock: Literal["virtual", "wall"] = "virtual"
    time_scale: Literal["auto"] | PositiveFloat = "auto"
    gate: Literal["controlled", "live"] = "controlled"
    decode: bool = False
    slo_ttft_s: PositiveFloat | None = None
    slo_inter_token_s: PositiveFloat | None = None
    memory_limit: str | None = None
    cell_limit_s: PositiveFloat | None = None
    methods: tuple[ServeMethod, ...]
    contexts: dict[str, ServeContext] = Field(default_factory=dict)
