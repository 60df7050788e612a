"""How a method is held at a reuse ratio, and what that leaves to execute.

Delta methods follow a schedule of dense transitions. Selective methods reuse every transition and
recompute a share of it, at the higher ratio that the paper pairs with each of theirs (B.4). Which
layers they recompute does not change what that costs, so no profile is run: DroidSpeak's block
lies in the middle, RelayCaching's range is the widest that its budget allows. Other settings can
be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from baselines.cacheblend import CacheBlend
from baselines.droidspeak import DroidSpeak
from baselines.epic import EPIC
from baselines.relaycaching import RelayCaching, candidate_spans
from baselines.selective import Selective
from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from kvcmas.registry import find_method
from traces.bounds import scheduled_work
from traces.schedule import Schedule, controlled_schedule, readings
from traces.schema import TraceWorkflow

RhoKind = Literal["none", "all", "controlled", "budget", "gate"]
GateKind = Literal["controlled", "live"]


@dataclass(frozen=True)
class Budget:
    """How one method is held at a ratio: its kind, the ratio it gets, the settings for that."""

    kind: RhoKind
    rho: float | None
    settings: Mapping[str, Any]


def budget(
    name: str,
    rho: float,
    selective: Mapping[float, float],
    gate: GateKind,
    layers: int,
    workflows: Sequence[TraceWorkflow],
) -> Budget:
    """The budget of method ``name`` in a comparison at ``rho``.

    Args:
        selective: ratio of selective methods by that of delta methods.

    Raises:
        UserError: no partner for this ratio, or one that the method cannot realise.
    """
    if name == "nonshared":
        return Budget("none", None, {})
    if not issubclass(find_method(name), Selective):
        if name == "fullshared":
            return Budget("all", 1.0, {})
        return Budget("gate", None, {}) if gate == "live" else Budget("controlled", rho, {})
    if rho not in selective:
        known = ", ".join(f"{delta:g}" for delta in selective)
        raise UserError(f"no ratio of selective methods goes with rho={rho:g}; known: {known}")
    own = selective[rho]
    return Budget("budget", own, _selective_settings(name, own, layers, workflows))


def _selective_settings(
    name: str, rho: float, layers: int, workflows: Sequence[TraceWorkflow]
) -> dict[str, Any]:
    found: Method
    if name == "droidspeak":
        found = DroidSpeak.for_rho(
            rho, layers, lambda n: ((layers - n) // 2, (layers - n) // 2 + n - 1)
        )
    elif name == "cacheblend":
        found = CacheBlend.for_rho(rho, layers)
    elif name == "relaycaching":
        spans = candidate_spans(layers, rho)
        if not spans:
            raise UserError(f"relaycaching cannot realise rho={rho:g} with {layers} layers")
        widest = max(spans, key=lambda span: (span[2] - span[0], -abs(sum(span) - 1.5 * layers)))
        found = RelayCaching.for_rho(rho, layers, widest)
    elif name == "epic":
        found = EPIC.for_rho(rho, _reused_lengths(workflows))
    else:  # somebody else's selective method: its settings are its budget
        return {}
    changed = type(found)().settings()
    return {key: value for key, value in found.settings().items() if value != changed[key]}


def schedule(
    workflows: Sequence[TraceWorkflow], chosen: Budget, seed: int
) -> tuple[Schedule | None, dict[str, Any]]:
    """Which transitions are dense, with the settings of that; None leaves it to the method."""
    if chosen.kind == "gate" or chosen.rho is None:
        return None, {}
    rho = chosen.rho if chosen.kind == "controlled" else 1.0
    made = controlled_schedule(workflows, rho, seed=seed)
    return made, dict(made.settings)


def cell_bound(
    workflows: Sequence[TraceWorkflow], chosen: Budget, made: Schedule | None, method: Method
) -> float | None:
    """Speed-up over NonShared if prompt tokens were all that costs (DESIGN section 7).

    A selective method executes ``1 - rho`` of what it reuses. None under gates, which decide later.
    """
    if chosen.kind == "none":
        return 1.0
    if made is None:
        return None
    references = context_free(method)
    work = scheduled_work(
        workflows,
        made,
        correct_first=references and method.settings()["first_turn"] == "corrected",
        references=references,
    )
    executed = float(work.executed)
    if chosen.kind == "budget" and chosen.rho is not None:
        executed += (1 - chosen.rho) * (work.tokens - work.executed)
    return work.tokens / executed


def context_free(method: Method) -> bool:
    """Whether a method corrects context-free references, which somebody has to prefill."""
    settings = method.settings()
    return "first_turn" in settings and not settings.get("chained", False)


def _reused_lengths(workflows: Sequence[TraceWorkflow]) -> list[int]:
    return [r.tokens for w in workflows for turn in readings(w) for r in turn if not r.first]
