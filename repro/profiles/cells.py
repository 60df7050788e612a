"""One row of a comparison, as profiles, studies and command lines name it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CellSpec(BaseModel):
    """One row of a comparison: a method, settings, and how its reuse ratio is set.

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
