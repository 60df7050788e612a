"""Finding each method's budget for a target reuse ratio, on requests that are not evaluated.

Threshold methods (KVCMAS, KVComm) search their threshold in its logarithm: the gate's softmax is
near one-hot and many entropies are almost 0, so a linear search would spend its points where
nothing changes. Selective methods have closed-form budgets, two of them after an offline profile.
What was found is stored under a key of what it depends on, and found again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baselines.cacheblend import CacheBlend
from baselines.droidspeak import Block, DroidSpeak, candidate_blocks
from baselines.epic import EPIC
from baselines.nonshared import NonShared
from baselines.relaycaching import RelayCaching, Span, choose_range, value_deviation
from baselines.selective import search
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Method, State
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro.models.cache import cache_dir
from repro.runners.replay import replay, warm_up
from results.records import run_key
from traces.schema import TraceWorkflow

# Thresholds and the setting that holds them.
THRESHOLD = {"kvcmas": "tau", "kvcomm": "gamma"}
LOWEST, HIGHEST, STEPS = 1e-9, 1.0, 12
# Closed-loop profiling of layer blocks replays every candidate: a few requests are enough.
PROFILE_WORKFLOWS = 3


@dataclass(frozen=True)
class Point:
    """One point of a threshold's curve (Table 6): the realised rho."""

    threshold: float
    rho: float


@dataclass(frozen=True)
class Calibration:
    """Settings that hold a target rho, and what the search saw."""

    method: str
    target_rho: float
    settings: dict[str, Any]
    curve: tuple[Point, ...] = ()
    profile: Mapping[str, float] | None = None

    @property
    def rho(self) -> float | None:
        """Realised rho of the chosen threshold; None for closed-form budgets."""
        name = THRESHOLD.get(self.method)
        chosen = self.settings.get(name) if name else None
        return next((p.rho for p in self.curve if p.threshold == chosen), None)


class Calibrator:
    """Calibrates methods on one model.

    Args:
        warm: workflows that fill the pools.
        held_out: workflows on which rho is measured; they are not evaluated later.
        identity: what else the result depends on (model revision, dtype), for the key.
        on_step: told what is being tried.
    """

    def __init__(
        self,
        adapter: TransformersAdapter,
        topology: str,
        warm: tuple[TraceWorkflow, ...],
        held_out: tuple[TraceWorkflow, ...],
        *,
        reference_prefix: tuple[int, ...],
        identity: Mapping[str, Any],
        on_step: Callable[[str], None] = lambda step: None,
    ) -> None:
        if not held_out:
            raise UserError("calibration needs requests of its own; give --calibration")
        self._adapter = adapter
        self._topology = topology
        self._warm = warm
        self._held_out = held_out
        self._prefix = reference_prefix
        self._identity = {
            **identity,
            "warm": [w.model_dump(mode="json") for w in warm],
            "held_out": [w.model_dump(mode="json") for w in held_out],
        }
        self._on_step = on_step

    def calibrate(self, method: str, settings: Mapping[str, Any], rho: float) -> Calibration:
        """Settings of ``method`` for ``rho``: stored ones if there are, else found and stored.

        Raises:
            UserError: a method without a budget, or a rho it cannot realise.
        """
        if not 0 <= rho <= 1:
            raise UserError(f"rho={rho} lies outside 0..1")
        key = run_key({**self._identity, "method": method, "settings": settings, "rho": rho})
        path = cache_dir() / "calibration" / f"{method.replace(':', '.')}-{key}.json"
        if path.exists():
            return _from_json(json.loads(path.read_text()))
        found = self._find(method, settings, rho)
        _store(path, found)
        return found

    def _find(self, method: str, settings: Mapping[str, Any], rho: float) -> Calibration:
        layers = self._adapter.spec.layers
        if method in THRESHOLD:
            return self._search(method, settings, rho)
        if method == "droidspeak":
            return self._droidspeak(settings, rho)
        found: Method
        if method == "relaycaching":
            found = RelayCaching.for_rho(rho, layers, self._range(rho))
        elif method == "cacheblend":
            found = CacheBlend.for_rho(rho, layers)
        elif method == "epic":
            found = EPIC.for_rho(rho, self._reused_lengths())
        elif method == "graphflow":
            return Calibration(method, rho, {**settings, "dense_share": 1 - rho})
        else:
            raise UserError(f"{method} has no budget that could hold a reuse ratio")
        return Calibration(method, rho, {**found.settings(), **settings})

    def _search(self, method: str, settings: Mapping[str, Any], rho: float) -> Calibration:
        """Bisect the threshold in its logarithm; the nearest realised rho wins."""
        name = THRESHOLD[method]
        start = self._warm_state(method, settings)
        points: dict[float, Point] = {}

        def realised(threshold: float) -> float:
            if threshold not in points:
                self._on_step(f"{method}: {name}={threshold:.3g}")
                chosen = {**settings, name: threshold}
                points[threshold] = Point(threshold, self._rho(method, chosen, start))
            return points[threshold].rho

        low, high = LOWEST, HIGHEST
        if realised(high) > rho > realised(low):
            for _ in range(STEPS):
                middle = math.sqrt(low * high)
                low, high = (middle, high) if realised(middle) < rho else (low, middle)
                if abs(realised(middle) - rho) < 0.01:
                    break
        best = min(points.values(), key=lambda p: abs(p.rho - rho))
        curve = tuple(sorted(points.values(), key=lambda p: p.threshold))
        return Calibration(method, rho, {**settings, name: best.threshold}, curve)

    def _warm_state(self, method: str, settings: Mapping[str, Any]) -> State:
        self._on_step(f"{method}: filling its pool")
        engine = self._engine(method, settings)
        warm_up(engine, self._warm, self._topology)
        return engine.state()

    def _rho(self, method: str, settings: Mapping[str, Any], start: State) -> float:
        """Entry rho over the held-out requests, edges that nobody held before left out."""
        engine = self._engine(method, settings)
        engine.load_state(start)
        shared = executed = 0
        for workflow in self._held_out:
            for result in replay(engine, workflow, self._topology):
                for segment, entries in result.accounting.shared.items():
                    if segment not in result.first_seen:
                        shared += entries.total
                        executed += entries.executed
        return 1 - executed / shared

    def _droidspeak(self, settings: Mapping[str, Any], rho: float) -> Calibration:
        exact = self._exact_turns()
        layers = self._adapter.spec.layers

        def run(block: Block) -> float:
            self._on_step(f"droidspeak: layers {block[0]}-{block[1]}")
            engine = self._engine("droidspeak", {"blocks": (block,)})
            return self._error(engine, exact)

        profile: dict[str, float] = {}

        def choose(size: int) -> Block:
            candidates = candidate_blocks(layers, size, step=max(1, layers // 16))
            block, errors = search(candidates, run)
            profile.update({f"{a}-{b}": error for (a, b), error in errors.items()})
            return block

        found = DroidSpeak.for_rho(rho, layers, choose)
        return Calibration("droidspeak", rho, {**found.settings(), **settings}, (), profile)

    def _range(self, rho: float) -> Span:
        self._on_step("relaycaching: deviation of plain reuse")
        exact = self._exact_turns()
        deviations = []
        for reused, true in self._pairs(self._engine("fullshared", {}), exact):
            if reused.buffer is None or true.buffer is None:
                raise ValueError("profiling needs the turns' buffers")
            for segment in reused.holders:
                rows = reused.prompt.rows(segment)
                part = slice(rows.start, rows.stop)
                deviations.append(
                    value_deviation(true.buffer.v[:, :, part], reused.buffer.v[:, :, part])
                )
        return choose_range(torch.cat(deviations, dim=1), rho=rho)

    def _exact_turns(self) -> list[TurnResult]:
        engine = Engine(self._adapter, NonShared())
        return [
            result
            for workflow in self._held_out[:PROFILE_WORKFLOWS]
            for result in replay(engine, workflow, self._topology, keep_buffers=True)
        ]

    def _pairs(
        self, engine: Engine, exact: list[TurnResult]
    ) -> list[tuple[TurnResult, TurnResult]]:
        results = [
            result
            for workflow in self._held_out[:PROFILE_WORKFLOWS]
            for result in replay(engine, workflow, self._topology, keep_buffers=True)
        ]
        return list(zip(results, exact, strict=True))

    def _error(self, engine: Engine, exact: list[TurnResult]) -> float:
        """Mean relative error of K and V over reused segments and layers."""
        total, count = 0.0, 0
        for actual, true in self._pairs(engine, exact):
            if actual.buffer is None or true.buffer is None:
                raise ValueError("profiling needs the turns' buffers")
            for segment in actual.holders:
                rows = actual.prompt.rows(segment)
                part = slice(rows.start, rows.stop)
                for a, t in (
                    (actual.buffer.k, true.buffer.k),
                    (actual.buffer.v, true.buffer.v),
                ):
                    difference = (a[:, :, part] - t[:, :, part]).flatten(1).norm(dim=1)
                    total += float((difference / t[:, :, part].flatten(1).norm(dim=1)).mean())
                    count += 1
        return total / count

    def _reused_lengths(self) -> list[int]:
        """Lengths of the PH that somebody held before, over the held-out requests."""
        lengths = []
        for workflow in self._held_out:
            seen: set[str] = set()
            for turn in workflow.turns:
                prompt = turn.prompt
                for i in prompt.shared():
                    if prompt.slot(i) in seen:
                        lengths.append(len(prompt.segments[i]))
                    seen.add(prompt.slot(i))
                seen.add(turn.node.out_slot)
        return lengths

    def _engine(self, method: str, settings: Mapping[str, Any]) -> Engine:
        return Engine(self._adapter, make_method(method, settings), reference_prefix=self._prefix)


def _store(path: Path, found: Calibration) -> None:
    content = {
        "method": found.method,
        "target_rho": found.target_rho,
        "settings": found.settings,
        "curve": [[p.threshold, p.rho] for p in found.curve],
        "profile": dict(found.profile) if found.profile is not None else None,
    }
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=2))
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _from_json(content: Mapping[str, Any]) -> Calibration:
    return Calibration(
        method=content["method"],
        target_rho=content["target_rho"],
        settings=content["settings"],
        curve=tuple(Point(t, r) for t, r in content["curve"]),
        profile=content["profile"],
    )
