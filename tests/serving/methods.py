"""Methods for tests of the plug-in, found there as ``tests.serving.methods:Class``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from baselines.cacheblend import CacheBlend
from baselines.fullshared import FullShared
from baselines.relaycaching import RelayCaching
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Candidates, Fill, Method, Plan, Select, Sources, Turn
from kvcmas.engine.executor import Executor


class Selections:
    """What the first engine selected, taken again by the second; equal shares of both are kept."""

    def __init__(self) -> None:
        self.chosen: dict[tuple[Any, ...], list[Tensor]] = {}
        self.overlaps: list[float] = []

    def record(self, plan: Plan, key: tuple[Any, ...]) -> Plan:
        return replace(
            plan,
            events=tuple(
                replace(event, choose=self._choose(event, (*key, event.layer)))
                if isinstance(event, Select)
                else event
                for event in plan.events
            ),
        )

    def _choose(self, event: Select, key: tuple[Any, ...]) -> Callable[[Candidates], Tensor]:
        def choose(candidates: Candidates) -> Tensor:
            mine = event.choose(candidates)
            if key not in self.chosen:
                self.chosen[key] = [mine]
                return mine
            (first,) = self.chosen.pop(key)
            both = torch.isin(mine, first).sum()
            self.overlaps.append(float(both) / max(1, len(first)))
            return first

        return choose


SELECTIONS = Selections()


@dataclass(frozen=True)
class RecordedCacheBlend(CacheBlend):
    def plan(self, turn: Turn, sources: Sources) -> Plan:
        key = (self, turn.request, turn.node, turn.prompt.sha256)
        return SELECTIONS.record(super().plan(turn, sources), key)


@dataclass(frozen=True)
class RecordedRelay(RelayCaching):
    def plan(self, turn: Turn, sources: Sources) -> Plan:
        key = (self, turn.request, turn.node, turn.prompt.sha256)
        return SELECTIONS.record(super().plan(turn, sources), key)


@dataclass(frozen=True)
class _Exact:
    """The true delta between two caches."""

    target: SegmentCache
    source: SegmentCache

    @property
    def rows(self) -> int:
        return len(self.target)

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        k += self.target.k[layer].to(k.device) - self.source.k[layer]
        v += self.target.v[layer].to(v.device) - self.source.v[layer]


@dataclass(frozen=True)
class ExactDelta(Method):
    """Corrects every held PH with the true delta, from a dense prefill elsewhere."""

    name: ClassVar[str] = "exact_delta"
    executor: ClassVar[Executor | None] = None

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        assert self.executor is not None
        dense = self.executor.run(turn.prompt, Plan.make(turn.prompt)).buffer
        plan = FullShared().plan(turn, sources)
        fills = tuple(
            Fill(f.segment, f.cache, _Exact(dense.extract(turn.prompt.rows(f.segment)), f.cache))
            for f in plan.fills
        )
        return replace(plan, fills=fills)


@dataclass(frozen=True)
class Failing(FullShared):
    """FullShared that fails ``where``: in ``plan``, while ``filling``, or while ``learning``."""

    name: ClassVar[str] = "failing"
    where: str = "plan"
    request: str = "bad"

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        plan = super().plan(turn, sources)
        if turn.request != self.request:
            return plan
        if self.where == "plan":
            raise RuntimeError("injected")
        if self.where == "filling":
            fills = tuple(replace(fill, correction=_Raising()) for fill in plan.fills)
            return replace(plan, fills=fills)
        return plan

    def after_first_token(self, turn: Turn, *_: Any) -> None:
        if self.where == "learning" and turn.request == self.request:
            raise RuntimeError("injected")


class _Raising:
    rows = 1

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        if layer == 2:
            raise RuntimeError("injected")
