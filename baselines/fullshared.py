"""FullShared: reuse every shared cache as it is, after key re-alignment. The floor of cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcmas.engine.contract import Decision, Fill, Method, Plan, Sources, Turn


@dataclass(frozen=True)
class FullShared(Method):
    """Aligned source rows on every held PH; PF and first-seen PH are dense (paper 4.1)."""

    name: ClassVar[str] = "fullshared"

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Fill each held PH with its source cache."""
        fills, decisions = [], []
        for i in turn.prompt.shared():
            held = sources.held(i)
            if held is None:
                decisions.append(Decision(i, None, "dense", "first"))
                continue
            edge = turn.edge(i, held.node)
            if turn.force.get(i) is False:
                decisions.append(Decision(i, edge, "dense", "forced"))
            else:
                fills.append(Fill(i, held.cache))
                decisions.append(Decision(i, edge, "reuse", "always"))
        return Plan.make(turn.prompt, tuple(fills), tuple(decisions))
