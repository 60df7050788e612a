"""Finding each method's budget for a target reuse ratio, on requests that are not evaluated.

Methods with a gate search its threshold. One replay yields the entropy of every edge, and with it
the threshold that would have held the target; the next replay uses that one, since what is
accepted changes the pool and the caches that later edges see. So the search needs few replays and
moves in the logarithm of the threshold by itself, where most entropies are almost 0. Selective
methods have closed-form budgets, two of them after an offline profile. What was found is stored
under a key of what it depends on, and found again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines.cacheblend import CacheBlend
from baselines.epic import EPIC
from kvcmas.engine.contract import State
from kvcmas.errors import UserError
from repro.runners.offline import Requests, store
from repro.runners.profile import RULES, Profile, Profiler, Rule
from results.gates import THRESHOLDS

# Settings under which a method corrects everything that it can.
ALWAYS: Mapping[str, Mapping[str, float]] = {
    "kvcmas": {"tau": 1.0},
    "kvcomm": {"gamma": 1.0},
    "graphflow": {"dense_share": 0.0},
}
LOWEST, HIGHEST, STEPS, TOLERANCE = 1e-9, 1.0, 6, 0.01
# Where there are more requests, the first replay, which only suggests a threshold, sees so many.
FIRST = 40


@dataclass(frozen=True)
class Point:
    """One point of a threshold's curve (Table 6): the realised rho."""

    threshold: float
    rho: float


@dataclass(frozen=True)
class Gated:
    """An edge of the held-out requests: its tokens, and its gate's entropy where one was taken."""

    tokens: int
    entropy: float | None


@dataclass(frozen=True)
class Calibration:
    """Settings that hold a target rho, and what the search saw."""

    method: str
    target_rho: float
    settings: dict[str, Any]
    curve: tuple[Point, ...] = ()
    profile: Profile | None = None

    @property
    def rho(self) -> float | None:
        """Realised rho of the chosen threshold; None for closed-form budgets."""
        name = THRESHOLDS.get(self.method)
        chosen = self.settings.get(name) if name else None
        return next((p.rho for p in self.curve if p.threshold == chosen), None)


class Calibrator:
    """Calibrates methods on one model.

    Args:
        on_step: told what is being tried.
    """

    def __init__(
        self, requests: Requests, on_step: Callable[[str], None] = lambda step: None
    ) -> None:
        self._requests = requests
        self._on_step = on_step
        self.profiler = Profiler(requests, on_step)

    def known(self, method: str, settings: Mapping[str, Any], rho: float) -> bool:
        """Whether nothing has to be searched: the threshold is stored, or the method has none."""
        return method not in THRESHOLDS or self._stored(method, settings, rho).exists()

    def calibrate(
        self, method: str, settings: Mapping[str, Any], rho: float, rule: Rule | None = None
    ) -> Calibration:
        """Settings of ``method`` for ``rho``: stored ones if there are, else found and stored.

        Args:
            rule: how an offline profile chooses layers; None is the method's own.

        Raises:
            UserError: a method without a budget, a rho it cannot realise, or a rule for a method
                that chooses no layers.
        """
        if not 0 <= rho <= 1:
            raise UserError(f"rho={rho} lies outside 0..1")
        if method in RULES:
            profile = self.profiler.profile(method, settings, rho, rule)
            return Calibration(method, rho, profile.settings, (), profile)
        if rule is not None:
            raise UserError(f"{method} chooses no layers, so no rule chooses them")
        if method in THRESHOLDS:
            return self._threshold(method, settings, rho)
        layers = self._requests.adapter.spec.layers
        if method == "cacheblend":
            return _closed_form(CacheBlend.for_rho(rho, layers), settings, rho)
        if method == "epic":
            return _closed_form(EPIC.for_rho(rho, self._reused_lengths()), settings, rho)
        if method == "graphflow":
            return Calibration(method, rho, {**settings, "dense_share": 1 - rho})
        raise UserError(f"{method} has no budget that could hold a reuse ratio")

    def curve(
        self, method: str, settings: Mapping[str, Any], thresholds: Sequence[float]
    ) -> tuple[Point, ...]:
        """Realised rho at each threshold (Table 6), stored like :meth:`calibrate`'s.

        Raises:
            UserError: a method without a threshold.
        """
        if method not in THRESHOLDS:
            raise UserError(f"{method} has no threshold; {', '.join(THRESHOLDS)} have")
        path = self._requests.path("curve", method, settings=settings, thresholds=list(thresholds))
        if not path.exists():
            start = self._warm_state(method, settings)
            pairs = [[t, self._replay(method, settings, t, start)[0]] for t in thresholds]
            store(path, {"curve": pairs})
        return _points(json.loads(path.read_text())["curve"])

    def _threshold(self, method: str, settings: Mapping[str, Any], rho: float) -> Calibration:
        path = self._stored(method, settings, rho)
        if path.exists():
            content = json.loads(path.read_text())
            return Calibration(method, rho, content["settings"], _points(content["curve"]))
        start = self._warm_state(method, settings)
        points: dict[float, float] = {}
        threshold, steps = HIGHEST, STEPS
        if len(self._requests.held_out) > FIRST:
            steps -= 1
            few = self._requests.first(FIRST)
            threshold = threshold_for(self._replay(method, settings, HIGHEST, start, few)[1], rho)
        while threshold not in points and len(points) < steps:
            points[threshold], edges = self._replay(method, settings, threshold, start)
            if abs(points[threshold] - rho) <= TOLERANCE:
                break
            threshold = threshold_for(edges, rho)
        best = min(points, key=lambda t: abs(points[t] - rho))
        curve = tuple(Point(t, points[t]) for t in sorted(points))
        chosen = {**settings, THRESHOLDS[method]: best}
        store(path, {"settings": chosen, "curve": [[p.threshold, p.rho] for p in curve]})
        return Calibration(method, rho, chosen, curve)

    def _stored(self, method: str, settings: Mapping[str, Any], rho: float) -> Path:
        return self._requests.path("calibration", method, settings=settings, rho=rho)

    def _warm_state(self, method: str, settings: Mapping[str, Any]) -> State:
        self._on_step(f"{method}: filling its pool")
        return self._requests.warmed(method, settings).state()

    def _replay(
        self,
        method: str,
        settings: Mapping[str, Any],
        threshold: float,
        start: State,
        requests: Requests | None = None,
    ) -> tuple[float, list[Gated]]:
        """Entry rho over held-out requests (all, or ``requests``), and their edges.

        First-seen PH are left out.
        """
        name = THRESHOLDS[method]
        self._on_step(f"{method}: {name}={threshold:.3g}")
        engine = self._requests.engine(method, {**settings, name: threshold})
        engine.load_state(start)
        shared = executed = 0
        edges = []
        for result in (requests or self._requests).replay(engine):
            entropies = {d.segment: d.entropy for d in result.decisions}
            for segment, entries in result.accounting.shared.items():
                if segment not in result.first_seen:
                    shared += entries.total
                    executed += entries.executed
                    tokens = len(result.prompt.segments[segment])
                    edges.append(Gated(tokens, entropies.get(segment)))
        if not shared:
            raise UserError("the calibration requests reuse nothing, so no reuse ratio exists")
        return 1 - executed / shared, edges

    def _reused_lengths(self) -> list[int]:
        """Lengths of the PH that somebody held before, over the held-out requests."""
        lengths = []
        for workflow in self._requests.held_out:
            seen: set[str] = set()
            for turn in workflow.turns:
                prompt = turn.prompt
                for i in prompt.shared():
                    if prompt.slot(i) in seen:
                        lengths.append(len(prompt.segments[i]))
                    seen.add(prompt.slot(i))
                seen.add(turn.node.out_slot)
        return lengths


def threshold_for(edges: Sequence[Gated], rho: float) -> float:
    """The threshold under which these entropies accept nearest to ``rho`` of the edges' tokens.

    It lies in the middle, in the logarithm, between two entropies that occurred. Edges without
    an entropy (a cold pool) are refused under any threshold.
    """
    total = sum(edge.tokens for edge in edges)
    # (share accepted, threshold from which it is): accepting nothing comes first.
    steps = [(0.0, 0.0)]
    accepted = 0
    for entropy, tokens in sorted((e.entropy, e.tokens) for e in edges if e.entropy is not None):
        accepted += tokens
        step = (accepted / total, entropy)
        if steps[-1][1] == entropy and len(steps) > 1:
            steps[-1] = step
        else:
            steps.append(step)
    nearest = min(range(len(steps)), key=lambda i: abs(steps[i][0] - rho))
    above = steps[nearest + 1][1] if nearest + 1 < len(steps) else HIGHEST
    return math.sqrt(max(steps[nearest][1], LOWEST) * max(above, LOWEST))


def _closed_form(found: CacheBlend | EPIC, settings: Mapping[str, Any], rho: float) -> Calibration:
    return Calibration(found.name, rho, {**found.settings(), **settings})


def _points(pairs: Sequence[Sequence[float]]) -> tuple[Point, ...]:
    return tuple(Point(threshold, rho) for threshold, rho in pairs)
