"""What the benchmarks' agents have in common: who reads whom, how a message is put together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcmas.engine.workflow import QUERY, Node, Workflow, build
from kvcmas.errors import UserError
from workloads.base import Message, Role, Slot, Text


@dataclass(frozen=True, kw_only=True)
class Team(ABC):
    """A workload's agents and their graph.

    Attributes:
        topology: who reads whom (``kvcmas.engine.workflow.TOPOLOGIES``).
        rounds: of the ``loop`` topology.

    Raises:
        UserError: a graph that cannot be built.
    """

    topology: str = "fully_connected"
    rounds: int = 1

    def __post_init__(self) -> None:
        try:
            self.workflow  # noqa: B018
        except ValueError as error:
            raise UserError(f"{self.name}: {error}") from error

    @property
    @abstractmethod
    def name(self) -> str:
        """The registry's name of the workload."""

    @property
    @abstractmethod
    def roles(self) -> tuple[Role, ...]:
        """The agents in order."""

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents."""
        return tuple(role.name for role in self.roles)

    @cached_property
    def workflow(self) -> Workflow:
        """The graph over the agents."""
        return build(self.topology, len(self.roles), self.rounds)


def compose(
    roles: Sequence[Role], node: Node, filled: Sequence[str], *, query: str, observed: str
) -> Message:
    """The message of ``node``: every filled slot under its heading, the role's instruction last.

    ``query`` and ``observed`` are the headings of the user's query and of task observations. Words
    stand between any two slots, so that the prompt is the same whatever text fills them. A slot
    holds what a model wrote, so the beginning that its reply was given belongs to the heading.
    """
    user: list[Text | Slot] = []
    for slot in filled:
        gap = "\n\n" if user else ""
        user += [Text(f"{gap}{_heading(slot, roles, query, observed)}"), Slot(slot)]
    role = roles[node.agent]
    return Message(role.system, (*user, Text(f"\n\n{role.instruction}")), role.reply)


def _heading(slot: str, roles: Sequence[Role], query: str, observed: str) -> str:
    if slot == QUERY:
        return f"{query}\n"
    if slot.startswith("obs"):
        return f"{observed}\n"
    agent = slot.removeprefix("out").partition("@")[0]  # a later round's slot ends in @2
    role = roles[int(agent)]
    return f"{role.name} wrote:\n{role.reply}"
