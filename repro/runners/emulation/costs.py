"""What a request is charged under the public harness's cost model, before anything is run.

The shared tokens that a turn reads stand first in its prompt, as a stream of the workflow, and are
a prefix hit where an earlier turn has executed them. Of that span a method executes a fixed share
again. Methods with context-free references prefill the first turn's span once more, by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, ClassVar, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

from baselines.nonshared import NonShared
from kvcmas.engine.contract import require_choice
from kvcmas.errors import UserError
from kvcmas.registry import suggestion
from repro.runners.serving.engine import Request
from traces.schedule import HopKind

Correction = Literal["none", "full", "low_rank"]

NON_CHAINED = "kvcmas-non-chained"


class MethodCost(BaseModel):
    """What one method is charged on a request that reuses; ``note`` says where that is from.

    Attributes:
        full_layers: layers of the hand-over span that are executed again.
        check_layers: layers executed in full before tokens are selected; the others execute pages
            that hold a selected token.
        encode: one context-free prefill of the first span of a workflow.
        correction: the sum that stands for correcting a cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    note: str
    reuses: bool = True
    full_layers: int | None = None
    check_layers: int | None = None
    encode: bool = False
    correction: Correction = "none"


class Constants(BaseModel):
    """The file ``repro/emulation.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: PositiveInt
    page_tokens: PositiveInt
    anchors: PositiveInt
    rank: PositiveInt
    methods: dict[str, MethodCost]

    @model_validator(mode="after")
    def _layers_are_there(self) -> Constants:
        for name, cost in self.methods.items():
            for layers in (cost.full_layers, cost.check_layers):
                if layers is not None and not 0 <= layers <= self.layers:
                    raise ValueError(f"{name} executes {layers} of {self.layers} layers")
        return self

    def executed_share(self, cost: MethodCost, rho: float) -> float:
        """Share of the hand-over span that is executed again at the ratio ``rho`` of its tokens.

        A page stays clean if none of its tokens is selected, each with probability ``1 - rho``.
        """
        if not cost.reuses:
            return 1.0
        if cost.full_layers is not None:
            return cost.full_layers / self.layers
        if cost.check_layers is None:
            return 0.0
        dirty = 1 - rho**self.page_tokens
        return (cost.check_layers + (self.layers - cost.check_layers) * dirty) / self.layers

    def method(self, name: str, rho: float | None) -> Emulated:
        """The emulation of one method; ``rho`` is its own ratio, None for one that has none.

        Raises:
            UserError: the harness has no such method.
        """
        if name not in self.methods:
            raise UserError(f"{name} has no emulation{suggestion(name, tuple(self.methods))}")
        cost = self.methods[name]
        return Emulated(
            reuses=cost.reuses,
            executed_share=self.executed_share(cost, 1.0 if rho is None else rho),
            encode=cost.encode,
            correction=cost.correction,
            anchors=self.anchors,
            rank=self.rank,
            page_tokens=None if cost.check_layers is None else self.page_tokens,
        )


def load_constants(changes: Mapping[str, Any] | None = None) -> Constants:
    """What is shipped with the package, with ``changes`` of top-level keys.

    Raises:
        UserError: an unknown key or a value that makes no sense.
    """
    text = (resources.files("repro") / "emulation.yaml").read_text(encoding="utf-8")
    try:
        return Constants.model_validate(yaml.safe_load(text) | dict(changes or {}))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"emulation.{place}: {first['msg']}") from error


@dataclass(frozen=True)
class Emulated(NonShared):
    """A dense method with a price list: it shares no cache, an engine that emulates charges it.

    Attributes:
        executed_share: of the hand-over span, executed again where the request reuses.
        anchors, rank: size of the sums that stand for corrections.
        page_tokens: what the share was computed for, where pages play a part; kept for records.

    Raises:
        UserError: a share outside [0, 1] or an unknown correction.
    """

    name: ClassVar[str] = "emulated"

    reuses: bool = True
    executed_share: float = 0.0
    encode: bool = False
    correction: Correction = "none"
    anchors: int = 10
    rank: int = 32
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("correction", self.correction, get_args(Correction))
        if not 0 <= self.executed_share <= 1:
            raise UserError(f"executed_share={self.executed_share} must be between 0 and 1")

    def charges(self) -> dict[str, Any]:
        """The price list as JSON-able values, for records and run keys."""
        own = [f.name for f in fields(self) if not hasattr(NonShared, f.name)]
        return {name: getattr(self, name) for name in own}


@dataclass(frozen=True)
class Hop:
    """What one request is charged, in tokens.

    Attributes:
        kind: see :func:`traces.schedule.even_hops`.
        tokens: of the prompt.
        stream: leading tokens that are the workflow's own shared ones; others are seen once.
        hit: of those, given by the prefix cache.
        encode: context-free prefill before it.
    """

    kind: HopKind
    tokens: int
    stream: int
    hit: int
    encode: int

    @property
    def executed(self) -> int:
        """Tokens prefilled for this request."""
        return self.tokens - self.hit + self.encode


class Planner:
    """Charges requests in the order in which they are served; remembers whose stream is cached.

    Decisions are those of :func:`traces.schedule.even_schedule`. A request that the schedule makes
    dense brings tokens of its own; where that is the first turn, the second one fills the cache.
    """

    def __init__(self, method: Emulated) -> None:
        self._method = method
        self._cached: set[str] = set()

    def hop(self, request: Request) -> Hop:
        """The charge of the next request."""
        method, workflow = self._method, request.workflow.request
        span = sum(len(s) for s in request.prompt.segments if s.slot is not None)
        accepted, first = all(request.force.values()), request.position == 0
        encode = span if method.encode and first else 0
        kind: HopKind
        stream = hit = 0
        if not method.reuses:
            kind = "first" if first else "dense"
        elif workflow in self._cached:
            kind = "reused" if accepted else "dense"
            if accepted:
                hit = round((1 - method.executed_share) * span)
                stream = hit if method.executed_share else span
        elif accepted or not first:
            kind, stream = ("first" if first else "refill"), span
            self._cached.add(workflow)
        else:
            kind = "dense"
        if request.last:
            self._cached.discard(workflow)
        return Hop(kind, len(request.prompt), stream, hit, encode)


def hops(method: Emulated, requests: Iterable[Request]) -> list[Hop]:
    """All charges of a cell whose requests are served in this order."""
    planner = Planner(method)
    return [planner.hop(request) for request in requests]


def work_bound(charged: Iterable[Hop]) -> float:
    """Prompt tokens over executed ones: the speed-up if they were all that costs."""
    found = list(charged)
    return sum(hop.tokens for hop in found) / sum(hop.executed for hop in found)


def full_prefills(charged: Iterable[Hop]) -> int:
    """Requests of which nothing is reused."""
    return sum(hop.kind != "reused" for hop in charged)
