"""How an agent's message is put together: what it reads, under headings, then its instruction."""

from __future__ import annotations

from collections.abc import Sequence

from kvcmas.engine.workflow import QUERY, Node
from workloads.base import Message, Role, Slot, Text


def compose(
    roles: Sequence[Role], node: Node, filled: Sequence[str], *, query: str, observed: str
) -> Message:
    """The message of ``node``: every filled slot under its heading, the role's instruction last.

    ``query`` and ``observed`` are the headings of the user's query and of task observations. Words
    stand between any two slots, so that the prompt is the same whatever text fills them.
    """
    user: list[Text | Slot] = []
    for slot in filled:
        gap = "\n\n" if user else ""
        user += [Text(f"{gap}{_heading(slot, roles, query, observed)}\n"), Slot(slot)]
    role = roles[node.agent]
    return Message(role.system, (*user, Text(f"\n\n{role.instruction}")))


def _heading(slot: str, roles: Sequence[Role], query: str, observed: str) -> str:
    if slot == QUERY:
        return query
    if slot.startswith("obs"):
        return observed
    agent = slot.removeprefix("out").partition("@")[0]  # a later round's slot ends in @2
    return f"{roles[int(agent)].name} wrote:"
