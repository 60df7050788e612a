"""NonShared: every agent prefills its whole prompt. The ceiling of accuracy and of cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcmas.engine.contract import Decision, Method, Plan, Sources, Turn, Wants


@dataclass(frozen=True)
class NonShared(Method):
    """Dense prefill without cross-agent reuse (paper 4.1)."""

    name: ClassVar[str] = "nonshared"

    @property
    def wants(self) -> Wants:
        """Nothing is kept between turns."""
        return Wants(sources=False)

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Every row enters at layer 0."""
        decisions = (Decision(i, None, "dense", "nonshared") for i in turn.prompt.shared())
        return Plan.make(turn.prompt, decisions=tuple(decisions))
