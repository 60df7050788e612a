"""Workflow graphs: which turn consumes which shared slot (paper sections 2.1 and B.1).

A node is one agent's turn in one round, ``A1`` or ``A1@2``. Node names do not change from request
to request, so an edge ``(source node, target node, slot)`` recurs and can be learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

QUERY = "q"


@dataclass(frozen=True)
class Node:
    """One turn of the static graph: ``agent`` in ``round`` (from 1) reads its parents' outputs."""

    agent: int
    round: int = 1
    parents: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``A{agent}``, with ``@{round}`` beyond the first round."""
        return _at(f"A{self.agent}", self.round)

    @property
    def out_slot(self) -> str:
        """Slot that this turn's output fills."""
        return _at(f"out{self.agent}", self.round)

    @property
    def obs_slot(self) -> str:
        """Slot of a task observation made from this turn's output (code result, feedback)."""
        return _at(f"obs{self.agent}", self.round)


@dataclass(frozen=True)
class Workflow:
    """Turns in static topological order. Every turn reads the query and its parents' outputs.

    Raises:
        ValueError: a parent that does not come earlier, or two turns of the same name.
    """

    name: str
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise ValueError(f"two turns are called {node.name}")
            if missing := [p for p in node.parents if p not in seen]:
                raise ValueError(f"{node.name} reads {missing[0]}, which does not come before it")
            seen.add(node.name)
        if not self.nodes:
            raise ValueError("a workflow needs at least one turn")

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def consumes(self, node: Node) -> tuple[str, ...]:
        """Slots in prompt order: the query, then each parent's output and its observation."""
        slots = [QUERY]
        for parent in node.parents:
            slots += [self[parent].out_slot, self[parent].obs_slot]
        return tuple(slots)

    def consumers(self, slot: str) -> tuple[str, ...]:
        """Turns that read ``slot``, in static order; each is the next one's source."""
        return tuple(node.name for node in self.nodes if slot in self.consumes(node))

    @property
    def agents(self) -> int:
        """Number of distinct agents."""
        return len({node.agent for node in self.nodes})


def _at(name: str, round_: int) -> str:
    return name if round_ == 1 else f"{name}@{round_}"


def sequential(agents: int) -> Workflow:
    """A chain: each agent reads the query and the output of the one before it."""
    return Workflow(
        "sequential", tuple(Node(a, 1, (f"A{a - 1}",) if a else ()) for a in range(agents))
    )


def fully_connected(agents: int) -> Workflow:
    """Every agent reads all earlier ones: FullConnected made acyclic in agent order (paper B.1)."""
    return Workflow(
        "fully_connected",
        tuple(Node(a, 1, tuple(f"A{p}" for p in range(a))) for a in range(agents)),
    )


def loop(agents: int, rounds: int) -> Workflow:
    """Fully connected within a round; later rounds also read all outputs of the round before."""
    nodes = []
    for r in range(1, rounds + 1):
        for a in range(agents):
            before = [_at(f"A{p}", r - 1) for p in range(agents)] if r > 1 else []
            nodes.append(Node(a, r, (*before, *(_at(f"A{p}", r) for p in range(a)))))
    return Workflow("loop", tuple(nodes))


def fan_in(agents: int) -> Workflow:
    """All agents but the last read only the query; the last reads them all."""
    nodes = [Node(a) for a in range(agents - 1)]
    last = Node(agents - 1, 1, tuple(node.name for node in nodes))
    return Workflow("fan_in", (*nodes, last))


def fan_out(agents: int) -> Workflow:
    """The first agent's output goes to every other agent; those do not read each other."""
    return Workflow("fan_out", (Node(0), *(Node(a, 1, ("A0",)) for a in range(1, agents))))


TOPOLOGIES: Mapping[str, str] = {
    "sequential": "each agent reads the one before it",
    "fully_connected": "each agent reads all earlier ones (the paper's accuracy workflow)",
    "loop": "fully connected, repeated for several rounds",
    "fan_in": "independent agents, one reader",
    "fan_out": "one writer, independent readers",
}


def build(topology: str, agents: int, rounds: int = 1) -> Workflow:
    """The named topology over ``agents`` agents.

    Raises:
        ValueError: an unknown name, fewer than one agent or round, or rounds where the topology
            has none.
    """
    if topology not in TOPOLOGIES:
        raise ValueError(f"unknown topology {topology!r}; known: {', '.join(TOPOLOGIES)}")
    if agents < 1 or rounds < 1:
        raise ValueError("agents and rounds start at 1")
    if topology == "loop":
        return loop(agents, rounds)
    if rounds != 1:
        raise ValueError(f"{topology} has one round; use loop")
    return {
        "sequential": sequential,
        "fully_connected": fully_connected,
        "fan_in": fan_in,
        "fan_out": fan_out,
    }[topology](agents)
