"""Settings of the plug-in: vLLM's ``kv_connector_extra_config``. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from kvcmas.registry import make_method


class ServingConfig(BaseModel):
    """What a server is started with.

    Attributes:
        method: registered name or ``module:Class``.
        settings: the method's settings.
        pool_scope: is what a method learns shared by the whole ``process`` or kept per ``tenant``.
        row_budget: prompt rows that may be served from the plug-in in one scheduler step; further
            requests wait for the next one. None takes vLLM's token budget. One request always goes.
        workflows: workflows whose source caches are kept; beyond that the one that was idle longest
            is forgotten, and its later turns run densely.
        reference_prefix: ids before a segment in its context-free reference prefill.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = "kvcmas"
    settings: dict[str, Any] = Field(default_factory=dict)
    pool_scope: Literal["process", "tenant"] = "process"
    row_budget: PositiveInt | None = None
    workflows: PositiveInt = 256
    reference_prefix: tuple[NonNegativeInt, ...] = ()

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """From a connector's extra configuration.

        Raises:
            UserError: an unknown key, an illegal value, or a method that cannot be made.
        """
        try:
            config = cls.model_validate(dict(extra))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"kv_connector_extra_config.{where}: {first['msg']}") from error
        config.make_method()
        return config

    def make_method(self) -> Method:
        """A fresh method: one per scope, because methods learn."""
        return make_method(self.method, self.settings)
