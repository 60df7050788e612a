"""Offline profiles: the layers that DroidSpeak and RelayCaching rebuild, GraphFlow's relations.

Two rules choose layers. ``search`` serves a few requests with every candidate and takes the one
that leaves the least error. ``deviation`` looks at plain reuse once and takes the layers that
deviate most; it knows nothing of the stale rows with which a range is entered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from baselines.droidspeak import DroidSpeak, candidate_blocks, choose_block
from baselines.graphflow import GraphFlow
from baselines.relaycaching import (
    RelayCaching,
    Span,
    candidate_spans,
    choose_range,
    value_deviation,
)
from baselines.selective import search
from kvcmas.engine.session import TurnResult
from kvcmas.errors import UserError
from repro.runners.offline import Requests, store

Rule = Literal["search", "deviation"]
Entries = tuple[Tensor, Tensor]
# What each method's authors describe; the other rule is there to compare.
RULES: Mapping[str, Rule] = {"droidspeak": "search", "relaycaching": "deviation"}
PROFILED = (*RULES, "graphflow")
# Every candidate is replayed: a few requests have to do, and at most so many first layers of a
# block or a range (whose last layer varies as well).
WORKFLOWS = 3
BLOCK_STARTS, RANGE_STARTS = 16, 6


@dataclass(frozen=True)
class Profile:
    """Settings that an offline phase chose, and what it chose from.

    Attributes:
        scores: per candidate, or per layer, or per relation: what ``measure`` names.
    """

    method: str
    rho: float
    rule: str
    settings: dict[str, Any]
    measure: str
    scores: dict[str, float] = field(default_factory=dict)


class Profiler:
    """Runs the offline phases of one model's methods, each once.

    Args:
        on_step: told what is being tried.
    """

    def __init__(self, requests: Requests, on_step: Callable[[str], None]) -> None:
        self._all = requests
        self._few = requests.first(WORKFLOWS)
        self._on_step = on_step

    def profile(
        self, method: str, settings: Mapping[str, Any], rho: float, rule: Rule | None = None
    ) -> Profile:
        """The stored profile of ``method`` for ``rho``; made now, saying so, if there is none.

        Raises:
            UserError: a method without an offline phase, or a ``rho`` out of its reach.
        """
        if method not in PROFILED:
            raise UserError(f"{method} has no offline phase; {', '.join(PROFILED)} have")
        if method == "graphflow":
            if rule is not None:
                raise UserError("graphflow chooses no layers, so no rule chooses them")
            return self._graphflow(settings)
        rule = rule or RULES[method]
        if rule not in get_args(Rule):
            raise UserError(f"rule={rule!r} is not one of {', '.join(get_args(Rule))}")
        path = self._few.path("profile", method, settings=settings, rho=rho, rule=rule)
        if path.exists():
            return Profile(**json.loads(path.read_text()))
        self._on_step(f"{method}: no profile yet for rho {rho:g} by {rule}, making it")
        make = self._droidspeak if method == "droidspeak" else self._relaycaching
        found = make(settings, rho, rule)
        store(path, asdict(found))
        # As it will be read back: tuples are lists there.
        return Profile(**json.loads(path.read_text()))

    def _droidspeak(self, settings: Mapping[str, Any], rho: float, rule: Rule) -> Profile:
        layers = self._all.adapter.spec.layers
        scores: dict[str, float] = {}

        def choose(size: int) -> tuple[int, int]:
            if rule == "deviation":
                mean = self._deviation.mean(dim=1).tolist()
                scores.update(_by_layer(mean))
                return choose_block(mean, size)
            blocks = candidate_blocks(layers, size, step=math.ceil(layers / BLOCK_STARTS))
            block, errors = search(
                blocks, lambda b: self._error("droidspeak", {**settings, "blocks": (b,)})
            )
            scores.update({f"{a}-{b}": error for (a, b), error in errors.items()})
            return block

        found = DroidSpeak.for_rho(rho, layers, choose)
        chosen = {**settings, "blocks": found.blocks}
        return Profile("droidspeak", rho, rule, chosen, MEASURES[rule], scores)

    def _relaycaching(self, settings: Mapping[str, Any], rho: float, rule: Rule) -> Profile:
        layers = self._all.adapter.spec.layers
        suffix = {"suffix": settings["suffix"]} if "suffix" in settings else {}

        def budget(span: Span) -> dict[str, Any]:
            found = RelayCaching.for_rho(rho, layers, span, **suffix)
            return {**settings, "span": found.span, "ratio": found.ratio}

        if rule == "deviation":
            span = choose_range(self._deviation, rho=rho)
            scores = _by_layer(self._deviation.mean(dim=1).tolist())
        else:
            spans = candidate_spans(layers, rho, step=math.ceil(layers / RANGE_STARTS))
            if not spans:
                raise UserError(f"rho={rho} leaves RelayCaching no budget in {layers} layers")
            span, errors = search(spans, lambda s: self._error("relaycaching", budget(s)))
            scores = {f"{a}-{d}-{b}": error for (a, d, b), error in errors.items()}
        return Profile("relaycaching", rho, rule, budget(span), MEASURES[rule], scores)

    def _graphflow(self, settings: Mapping[str, Any]) -> Profile:
        self._on_step("graphflow: calibrating its relations on the warm-up requests")
        method = self._all.warmed("graphflow", settings).method
        if not isinstance(method, GraphFlow):
            raise TypeError(f"the registry's graphflow is {type(method).__name__}")
        scores = dict(method.ranking())
        return Profile("graphflow", 1.0, "calibration", dict(settings), "variance", scores)

    @cached_property
    def _exact(self) -> list[TurnResult]:
        engine = self._few.engine("nonshared", {})
        return list(self._few.replay(engine, keep_buffers=True))

    @cached_property
    def _deviation(self) -> Tensor:
        """Value deviation of plain reuse, ``[layers, tokens]``."""
        self._on_step("deviation of plain reuse")
        parts = [
            value_deviation(true[1], reused[1]) for reused, true in self._entries("fullshared", {})
        ]
        return torch.cat(parts, dim=1)

    def _error(self, method: str, settings: Mapping[str, Any]) -> float:
        """Mean relative error of K and V over reused segments and layers."""
        self._on_step(f"{method}: {', '.join(f'{k}={v}' for k, v in settings.items())}")
        errors = [
            (a - t).flatten(1).norm(dim=1) / t.flatten(1).norm(dim=1)
            for actual, true in self._entries(method, settings)
            for a, t in zip(actual, true, strict=True)
        ]
        return float(torch.stack(errors).mean())

    def _entries(self, method: str, settings: Mapping[str, Any]) -> list[tuple[Entries, Entries]]:
        """K, V ``[layers, kv_heads, tokens, head_dim]`` of reused segments, and the exact ones."""
        engine = self._few.engine(method, settings)
        pairs = []
        results = self._few.replay(engine, keep_buffers=True)
        for actual, true in zip(results, self._exact, strict=True):
            for segment in actual.holders:
                rows = actual.prompt.rows(segment)
                pairs.append((_rows(actual, rows), _rows(true, rows)))
        return pairs


MEASURES: Mapping[Rule, str] = {
    "search": "mean relative K, V error",
    "deviation": "mean value deviation of plain reuse",
}


def _rows(result: TurnResult, rows: range) -> Entries:
    if result.buffer is None:
        raise ValueError("profiling needs the turns' buffers")
    part = slice(rows.start, rows.stop)
    return result.buffer.k[:, :, part], result.buffer.v[:, :, part]


def _by_layer(values: Sequence[float]) -> dict[str, float]:
    return {str(layer): value for layer, value in enumerate(values)}
