"""Serving agent-specific segments (PF) from a store instead of executing them.

``pf_policy`` exists for every method and is carried out here, after the method's plan: ``rotate``
re-aligns the PF rows of a template prefill (what the authors' code ships), ``delta`` adds a
low-rank delta that was preconstructed on the first request (paper A.2). The headline policy is
``dense``, which does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcmas.engine.cache import Buffer, SegmentCache
from kvcmas.engine.contract import Enter, Fill, Plan, State, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, ids_sha256
from kvcmas.pool.lowrank import Factors, by_token, factorise


@dataclass(frozen=True)
class PrefixDelta:
    """A preconstructed delta of one PF segment, layers from 1 (paper A.2)."""

    k: Factors
    v: Factors

    @property
    def rows(self) -> int:
        """All tokens of the segment."""
        return len(self.k)

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See :class:`~kvcmas.engine.contract.Correction`."""
        for target, factors in ((k, self.k), (v, self.v)):
            heads, _, dim = target.shape
            delta = factors.matrix(layer - 1).unflatten(1, (heads, dim)).transpose(0, 1)
            target += delta.to(target.dtype)


class PrefixStore:
    """PF caches of every agent, learned on its first request; process-wide.

    Args:
        delta_rank: rank of the preconstructed delta, or None for rotation only.
    """

    def __init__(self, delta_rank: int | None) -> None:
        self._rank = delta_rank
        self._known: dict[str, tuple[SegmentCache, PrefixDelta | None]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.state().nbytes

    def apply(self, turn: Turn, plan: Plan) -> Plan:
        """Fill every known PF; its rows leave the schedule, all but the prompt's last row."""
        fills = [
            Fill(i, *self._known[key])
            for i, key in _keys(turn.node, turn.prompt)
            if key in self._known
        ]
        return with_fills(turn.prompt, plan, fills)

    def learn(self, turn: Turn, buffer: Buffer, executor: Executor) -> None:
        """Keep the PF of an agent seen for the first time: template caches and deltas."""
        unknown = [(i, key) for i, key in _keys(turn.node, turn.prompt) if key not in self._known]
        if not unknown:
            return
        prefixes = Prompt(tuple(s for s in turn.prompt.segments if s.kind == "PF"))
        template = executor.run(prefixes, Plan.make(prefixes)).buffer
        position = {
            i: n
            for n, i in enumerate(i for i, s in enumerate(turn.prompt.segments) if s.kind == "PF")
        }
        for i, key in unknown:
            cache = template.extract(prefixes.rows(position[i]))
            rows = turn.prompt.rows(i)
            delta = None
            # The first segment has nothing before it: its template is exact.
            if self._rank is not None and rows.start > 0:
                target = buffer.extract(rows)
                delta = PrefixDelta(
                    *(
                        factorise(by_token(new[1:]), self._rank, minus=by_token(old[1:]))
                        for new, old in ((target.k, cache.k), (target.v, cache.v))
                    )
                )
            self._known[key] = (cache, delta)

    def state(self) -> State:
        """Everything learned, one entry per PF segment."""
        state = State({"prefixes": list(self._known)})
        for key, (cache, delta) in self._known.items():
            entry = {"k": cache.k, "v": cache.v}
            if delta is not None:
                entry |= {
                    "dk.a": delta.k.a,
                    "dk.b": delta.k.b,
                    "dv.a": delta.v.a,
                    "dv.b": delta.v.b,
                }
            state.entries[key] = entry
        return state

    def load_state(self, state: State) -> None:
        """Restore :meth:`state`."""
        self._known = {}
        for key in state.meta["prefixes"]:
            e = state.entries[key]
            delta = None
            if "dk.a" in e:
                delta = PrefixDelta(Factors(e["dk.a"], e["dk.b"]), Factors(e["dv.a"], e["dv.b"]))
            self._known[key] = (SegmentCache(e["k"], e["v"]), delta)


def with_fills(prompt: Prompt, plan: Plan, fills: Sequence[Fill]) -> Plan:
    """The plan with more segments filled, whose rows then need not be embedded and executed."""
    if not fills:
        return plan
    covered = torch.zeros(len(prompt), dtype=torch.bool)
    for fill in fills:
        rows = prompt.rows(fill.segment)
        covered[rows.start : rows.stop] = True
    covered[-1] = False
    events = tuple(
        replace(event, rows=event.rows[~covered[event.rows]])
        if isinstance(event, Enter) and event.hidden is None
        else event
        for event in plan.events
    )
    return replace(plan, fills=(*plan.fills, *fills), events=events)


def _keys(node: str, prompt: Prompt) -> Iterator[tuple[int, str]]:
    """Index and store key of each PF: the agent's turn, its ids and all PF ids before it."""
    before: list[int] = []
    for i, segment in enumerate(prompt.segments):
        if segment.kind == "PF" and len(segment):
            before += segment.ids
            yield i, f"{node}-{ids_sha256(before)[:16]}-{len(segment)}"
