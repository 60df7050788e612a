"""Warm pools: what methods have learned from other requests before a cell begins.

Warm-up workflows have the trace's agents and other content. With every correction refused they are
dense under any method, so that one pass over them teaches all methods at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.cache import Buffer
from kvcmas.engine.contract import Decision, Method, Plan, Sources, State, Turn, Wants
from kvcmas.engine.session import Engine
from repro.runners.checkpoint import INDEX, Checkpoint
from repro.runners.replay import warm_up
from traces.schema import TraceWorkflow


def learns(method: Method) -> bool:
    """Whether a method keeps anything from one request to the next."""
    return type(method).load_state is not Method.load_state or method.pf_policy != "dense"


@dataclass(frozen=True)
class Classroom(Method):
    """Dense turns from which several methods learn what each of them would have learned alone."""

    name: ClassVar[str] = "classroom"

    pupils: tuple[Method, ...] = field(default=(), repr=False)

    @property
    def wants(self) -> Wants:
        """Source caches if anybody uses them; nobody's selection is served here."""
        return Wants(sources=any(pupil.wants.sources for pupil in self.pupils))

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Every row is executed."""
        shared = turn.prompt.shared()
        return Plan.make(
            turn.prompt, decisions=tuple(Decision(i, None, "dense", "forced") for i in shared)
        )

    def after_first_token(self, turn: Turn, sources: Sources, plan: Plan, buffer: Buffer) -> None:
        """Each method plans the turn with its corrections refused, and learns from that plan.

        Raises:
            ValueError: a method that does not obey.
        """
        for pupil in self.pupils:
            own = pupil.plan(turn, sources)
            if own.fills:
                raise ValueError(f"{pupil.name} reuses a segment against the decision forced on it")
            pupil.after_first_token(turn, sources, own, buffer)


def fill(
    adapter: ModelAdapter,
    methods: Mapping[str, Method],
    workflows: Sequence[TraceWorkflow],
    topology: str,
    reference_prefix: Sequence[int] = (),
) -> dict[str, State]:
    """What each of ``methods`` has learned after these workflows, as engines take it.

    A method whose engine learns as well (``pf_policy``) goes through them alone.
    """
    together = [method for method in methods.values() if method.pf_policy == "dense"]
    alone = [method for method in methods.values() if method.pf_policy != "dense"]
    classroom = [Classroom(pupils=tuple(together))] if together else []
    engines = {
        id(method): Engine(adapter, method, reference_prefix=reference_prefix)
        for method in (*alone, *classroom)
    }
    for engine in engines.values():
        warm_up(engine, tuple(workflows), topology)
    return {
        name: (engines.get(id(method)) or Engine(adapter, method)).state()
        for name, method in methods.items()
    }


def save_pool(directory: Path, workflows: int, state: State) -> None:
    """Keep a pool under its name."""
    Checkpoint(directory).save(workflows, state)


def has_pool(directory: Path, workflows: int) -> bool:
    """Whether a pool filled by that many workflows is kept there; does not read it."""
    index = directory / INDEX
    return index.exists() and json.loads(index.read_text())["samples"] == workflows


def load_pool(directory: Path) -> State | None:
    """The pool kept there, if there is one.

    Raises:
        UserError: it is damaged.
    """
    return Checkpoint(directory).load()[1]


def check_reset(engine_state: State, pool: State | None) -> None:
    """See that a cell starts from its pool and nothing else.

    Raises:
        RuntimeError: something of an earlier cell is left.
    """
    expected = set() if pool is None else set(pool.entries)
    if set(engine_state.entries) != expected:
        raise RuntimeError(
            f"a cell starts with {len(engine_state.entries)} pool entries, not {len(expected)}"
        )
