"""Per-slot, process-wide anchor pools: insertion, compatibility, eviction (paper A.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor

from kvcmas.engine.contract import State

CapacityRule = Literal["strict", "authors"]


class Payload(Protocol):
    """What a method stores per anchor and edge."""

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
    """One earlier request of a slot: stored length, use count and, per edge, a payload."""

    request: str
    length: int
    uses: int = 0
    edges: dict[str, P] = field(default_factory=dict)
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
        """Bytes of all payloads."""
        return sum(p.nbytes for _, anchor in self for p in anchor.edges.values())

    def compatible(self, slot: str, edge: str) -> list[Anchor[P]]:
        """Anchors of ``slot`` that hold ``edge``, oldest first."""
        return [a for a in self._slots.get(slot, {}).values() if edge in a.edges]

    def anchor(self, slot: str, request: str) -> Anchor[P] | None:
        """The anchor of one request, if the pool holds it."""
        return self._slots.get(slot, {}).get(request)

    def insert(
        self, slot: str, request: str, length: int, edge: str, payload: P, *, exact: bool
    ) -> None:
        """Add an edge to the request's anchor, making room for a new anchor where the slot is full.

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
        anchor.edges[edge] = payload
        anchor.exact[edge] = exact
        anchor.serials[edge] = self._serial
        self._serial += 1

    def use(self, slot: str, requests: list[str]) -> None:
        """Count an accepted reuse of these anchors."""
        for request in requests:
            self._slots[slot][request].uses += 1

    def state(self) -> State:
        """Everything, with one immutable entry per (anchor, edge)."""
        slots: dict[str, list[dict[str, Any]]] = {}
        state = State({"slots": slots, "serial": self._serial})
        for slot, anchor in self:
            slots.setdefault(slot, []).append(
                {
                    "request": anchor.request,
                    "length": anchor.length,
                    "uses": anchor.uses,
                    "edges": {
                        edge: {"entry": str(anchor.serials[edge]), "exact": anchor.exact[edge]}
                        for edge in anchor.edges
                    },
                }
            )
            for edge, payload in anchor.edges.items():
                state.entries[str(anchor.serials[edge])] = payload.tensors()
        return state

    def load_state(self, state: State, payload: Callable[[dict[str, Tensor]], P]) -> None:
        """Replace the contents; ``payload`` rebuilds what its ``tensors()`` gave."""
        self._slots = {}
        self._serial = state.meta["serial"]
        for slot, anchors in state.meta["slots"].items():
            for meta in anchors:
                anchor: Anchor[P] = Anchor(meta["request"], meta["length"], meta["uses"])
                for edge, entry in meta["edges"].items():
                    anchor.edges[edge] = payload(state.entries[entry["entry"]])
                    anchor.exact[edge] = entry["exact"]
                    anchor.serials[edge] = int(entry["entry"])
                self._slots.setdefault(slot, {})[anchor.request] = anchor
