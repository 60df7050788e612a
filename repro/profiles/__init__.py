"""Experiment profiles: one YAML file each (DESIGN section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kvcmas.errors import UserError
from kvcmas.registry import suggestion
from repro.models.loading import DType
from repro.profiles.serve import ServeProfile


class AccuracyProfile(BaseModel):
    """Defaults of `repro accuracy`. Settings in ``settings`` are per method."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    dtype: DType = "auto"
    device: str = "auto"
    data: str = "hub"
    split: str = "test"
    n: PositiveInt
    seed: int = 0
    max_new_tokens: PositiveInt
    methods: tuple[str, ...]
    workload: dict[str, dict[str, Any]] = Field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)


class CellSpec(BaseModel):
    """One row of `repro fidelity`: a method, settings, and how its reuse ratio is set.

    ``rho`` calibrates the method's budget, ``rule`` says how an offline profile chooses layers
    for it (None: the method's own way); ``accept_all`` accepts every correction; without ``rho``
    and ``accept_all`` the settings are taken as they are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    settings: dict[str, Any] = Field(default_factory=dict)
    rho: float | None = Field(default=None, ge=0, le=1)
    rule: Literal["search", "deviation"] | None = None
    accept_all: bool = False

    @model_validator(mode="after")
    def _rule_has_rho(self) -> CellSpec:
        if self.rule is not None and self.rho is None:
            raise ValueError("rule= chooses layers for a reuse ratio; give rho= as well")
        return self


class FidelityProfile(BaseModel):
    """Defaults of `repro record`, `repro calibrate` and `repro fidelity`.

    A trace holds ``warm`` workflows that fill the
    pools, ``calibration`` ones, and ``n`` evaluated ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    warm: NonNegativeInt
    calibration: NonNegativeInt
    n: PositiveInt
    max_new_tokens: PositiveInt
    answer_tokens: PositiveInt = 16
    cells: tuple[CellSpec, ...]


class Profile(BaseModel):
    """A whole profile; one section per command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    accuracy: AccuracyProfile
    fidelity: FidelityProfile
    serve: ServeProfile


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles."""
    return _names(resources.files(__package__))


def load_profile(name: str) -> Profile:
    """The shipped profile ``name``.

    Raises:
        UserError: no such profile.
    """
    if name not in profile_names():
        raise UserError(f"unknown profile {name!r}{suggestion(name, profile_names())}")
    text = (resources.files(__package__) / f"{name}.yaml").read_text()
    return Profile.model_validate(yaml.safe_load(text))


def load_study(name: str) -> tuple[CellSpec, ...]:
    """The cells of a shipped study, the same in every profile.

    Raises:
        UserError: no such study.
    """
    folder = resources.files(__package__) / "studies"
    if name not in (known := _names(folder)):
        raise UserError(f"unknown study {name!r}{suggestion(name, known)}")
    cells = yaml.safe_load((folder / f"{name}.yaml").read_text())
    return tuple(CellSpec.model_validate(cell) for cell in cells)


def _names(folder: Traversable) -> tuple[str, ...]:
    files = (f.name for f in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


P = TypeVar("P", AccuracyProfile, FidelityProfile, ServeProfile)


def override(profile: P, values: Mapping[str, Any]) -> P:
    """``profile`` with top-level keys replaced.

    Raises:
        UserError: a value of the wrong type or out of range.
    """
    try:
        return type(profile).model_validate({**profile.model_dump(), **values})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
