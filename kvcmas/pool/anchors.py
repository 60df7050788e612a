"""Per-slot, process-wide anchor pools: insertion, compatibility, eviction (paper A.3).

An anchor is a set of named parts: a delta under each edge's name and, where all edges of an anchor
share one base, that base under ``BASE``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from kvcmas.engine.contract import Edge, State

CapacityRule = Literal["strict", "authors"]

# Part of an anchor that all its edges share.
BASE = "base"
# Name of the source node of every edge whose reference is context-free.
REFERENCE = "ref"


def edge_key(edge: Edge) -> str:
    """Name of an edge within its slot's anchors."""
    return f"{edge.source}>{edge.target}"


class Payload(Protocol):
    """What a method stores as one part of an anchor."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Named tensors, for checkpoints."""
        ...


P = TypeVar("P", bound=Payload)


@dataclass
class Anchor(Generic[P]):
    """One earlier request of a slot.

    Attributes:
        length: tokens of the segment.
        uses: accepted reuses that it contributed to.
        parts: what it holds, by name.
        exact: per part, whether no approximate entry preceded or was in the segment it comes from.
        serials: per part, a number that no other part ever gets.
    """

    request: str
    length: int
    uses: int = 0
    parts: dict[str, P] = field(default_factory=dict)
    exact: dict[str, bool] = field(default_factory=dict)
    serials: dict[str, int] = field(default_factory=dict)


class AnchorPool(Generic[P]):
    """Anchors of every slot in insertion order.

    Args:
        capacity: V, per slot.
        window: how many of the oldest anchors compete for eviction.
        rule: ``strict`` never holds more than V; ``authors`` evicts only beyond V, so it holds V +
            1.
    """

    def __init__(self, capacity: int, window: int = 5, rule: CapacityRule = "strict") -> None:
        self._room = capacity if rule == "strict" else capacity + 1
        self._window = window
        self._slots: dict[str, dict[str, Anchor[P]]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return sum(len(slot) for slot in self._slots.values())

    def __iter__(self) -> Iterator[tuple[str, Anchor[P]]]:
        return ((slot, anchor) for slot, held in self._slots.items() for anchor in held.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for _, anchor in self for part in anchor.parts.values())

    def compatible(self, slot: str, edge: str) -> list[Anchor[P]]:
        """Anchors of ``slot`` that hold ``edge``, oldest first."""
        return [a for a in self._slots.get(slot, {}).values() if edge in a.parts]

    def anchor(self, slot: str, request: str) -> Anchor[P] | None:
        """The anchor of one request, if the pool holds it."""
        return self._slots.get(slot, {}).get(request)

    def insert(
        self, slot: str, request: str, length: int, parts: Mapping[str, P], *, exact: bool
    ) -> None:
        """Add parts to the request's anchor, making room for a new anchor where the slot is full.

        ``exact`` is a fact about the turn that all these parts come from.

        Raises:
            ValueError: the request is known with another length.
        """
        held = self._slots.setdefault(slot, {})
        if request not in held:
            while len(held) >= self._room:
                oldest = list(held.values())[: self._window]
                del held[min(oldest, key=lambda a: a.uses).request]
            held[request] = Anchor(request, length)
        anchor = held[request]
        if anchor.length != length:
            raise ValueError(f"anchor {slot}/{request} has {anchor.length} tokens, not {length}")
        for name, part in parts.items():
            anchor.parts[name] = part
            anchor.exact[name] = exact
            anchor.serials[name] = self._serial
            self._serial += 1

    def use(self, slot: str, requests: Sequence[str]) -> None:
        """Count an accepted reuse of these anchors; one that was evicted meanwhile has no count."""
        held = self._slots.get(slot, {})
        for request in requests:
            if request in held:
                held[request].uses += 1

    def state(self) -> State:
        """Everything, with one immutable entry per part."""
        slots: dict[str, list[dict[str, Any]]] = {}
        state = State({"slots": slots, "serial": self._serial})
        for slot, anchor in self:
            slots.setdefault(slot, []).append(
                {
                    "request": anchor.request,
                    "length": anchor.length,
                    "uses": anchor.uses,
                    "parts": {
                        name: {"entry": str(anchor.serials[name]), "exact": anchor.exact[name]}
                        for name in anchor.parts
                    },
                }
            )
            for name, part in anchor.parts.items():
                state.entries[str(anchor.serials[name])] = part.tensors()
        return state

    def load_state(self, state: State, payload: Callable[[dict[str, Tensor]], P]) -> None:
        """Replace the contents; ``payload`` rebuilds what its ``tensors()`` gave."""
        self._slots = {}
        self._serial = state.meta["serial"]
        for slot, anchors in state.meta["slots"].items():
            for meta in anchors:
                anchor: Anchor[P] = Anchor(meta["request"], meta["length"], meta["uses"])
                for name, part in meta["parts"].items():
                    anchor.parts[name] = payload(state.entries[part["entry"]])
                    anchor.exact[name] = part["exact"]
                    anchor.serials[name] = int(part["entry"])
                self._slots.setdefault(slot, {})[anchor.request] = anchor
