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
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from kvcmas.errors import UserError
from kvcmas.registry import suggestion
from repro.models.loading import DType
from repro.profiles.cells import CellSpec
from repro.profiles.serve import ServeProfile
from repro.profiles.stream import StreamProfile

__all__ = [
    "AccuracyProfile",
    "CellSpec",
    "FidelityProfile",
    "Profile",
    "TimingProfile",
    "load_profile",
    "load_study",
    "override",
    "profile_names",
]


class TimingProfile(BaseModel):
    """Requests of random ids in layout L0 on which every cell's reuse turn is timed.

    Two agents read ``shared`` tokens. ``warm`` requests fill the pools, ``n`` are timed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shared: PositiveInt
    warm: NonNegativeInt
    n: PositiveInt


class AccuracyProfile(BaseModel):
    """Defaults of `repro accuracy`.

    Attributes:
        n: evaluated samples, at most.
        orders: how often methods that learn from requests are run, each time in another order
            (Table 5); ``seed`` is the first order's.
        final_tokens: limit of the last agent's turn, where it is not ``max_new_tokens``.
        warm: requests that fill the pools first; they are not evaluated.
        calibration: requests on which budgets are found for the cells with a ``rho``.
        jobs: processes in which thresholds are searched where the CPU is the device, at most one
            per thread of PyTorch; each loads the model. Samples are run in one, alone.
        time_limit: minutes after which no further sample begins; None or 0 is no limit. What is
            left then is run when the command is given again.
        held_out: where those come from: the ``rest`` of the split, behind the evaluated samples,
            or a ``calibration`` split.
        settings: of each method, below those of its cells.
        workload: settings of each benchmark's workload.
        benches: what is different for one benchmark.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    dtype: DType = "auto"
    device: str = "auto"
    data: str = "hub"
    split: str = "test"
    n: PositiveInt
    seed: int = 0
    orders: PositiveInt = 1
    max_new_tokens: PositiveInt
    final_tokens: PositiveInt | None = None
    warm: NonNegativeInt = 0
    calibration: NonNegativeInt = 0
    jobs: PositiveInt = 1
    time_limit: NonNegativeFloat | None = None
    held_out: Literal["rest", "calibration"] = "rest"
    cells: tuple[CellSpec, ...]
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict)
    workload: dict[str, dict[str, Any]] = Field(default_factory=dict)
    benches: dict[str, dict[str, Any]] = Field(default_factory=dict)

    def at(self, bench: str) -> AccuracyProfile:
        """The profile as it is for ``bench``.

        Raises:
            UserError: a wrong value in ``benches``.
        """
        return override(self, self.benches.get(bench, {}))


class FidelityProfile(BaseModel):
    """Defaults of `repro record`, `repro calibrate` and `repro fidelity`.

    A trace holds ``warm`` workflows that fill the
    pools, ``calibration`` ones, and ``n`` evaluated ones. None as ``timing`` times nothing apart.
    The cells are spread over ``jobs`` processes where the CPU is the device, at most one per thread
    of PyTorch; what is timed apart is timed alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    warm: NonNegativeInt
    calibration: NonNegativeInt
    n: PositiveInt
    max_new_tokens: PositiveInt
    answer_tokens: PositiveInt = 16
    jobs: PositiveInt = 1
    timing: TimingProfile | None = None
    cells: tuple[CellSpec, ...]


class Profile(BaseModel):
    """A whole profile; one section per command."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    accuracy: AccuracyProfile
    fidelity: FidelityProfile
    serve: ServeProfile
    stream: StreamProfile


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


P = TypeVar("P", bound=BaseModel)


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
