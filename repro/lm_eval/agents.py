"""Agents for any task: the task's own prompt is the shared query, the last agent's reply counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvcmas.engine.workflow import Node, Workflow, build
from kvcmas.errors import UserError
from workloads.agents import compose
from workloads.base import Dataset, Message, Role, Sample, Score

ROLES = (
    Role(
        "Solver",
        "You are a solver. You work on a task directly and show how you get to its answer.",
        "Work on the task in a few short steps.",
    ),
    Role(
        "Analyst",
        "You are an analyst. You look at what a task asks for and at what is easy to get wrong.",
        "Work on the task yourself and say where an earlier attempt is wrong.",
    ),
    Role(
        "Critic",
        "You are a critic. You check every step of other agents' work.",
        "Name the mistakes that you find, or say that there are none.",
    ),
    Role(
        "FinalRefer",
        "You are the referee. Other agents have worked on a task; any of them can be wrong.",
        "Reply with the answer, in the form that the task asks for.",
    ),
)


@dataclass(frozen=True)
class AnyTask:
    """Solver, Analyst, Critic and FinalRefer; the harness brings the task and scores it.

    Raises:
        UserError: an unknown topology, or rounds where it has none.
    """

    topology: str = "fully_connected"
    rounds: int = 1

    def __post_init__(self) -> None:
        try:
            self.workflow  # noqa: B018
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def name(self) -> str:
        """What this workload is called in records."""
        return "any"

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the four agents."""
        return tuple(role.name for role in ROLES)

    @cached_property
    def workflow(self) -> Workflow:
        """The graph over the four agents."""
        return build(self.topology, len(ROLES), self.rounds)

    def load(self, data: str | Path, *, split: str, seed: int) -> Dataset:
        """There are no samples: tasks come from the harness.

        Raises:
            UserError: always.
        """
        raise UserError("tasks for these agents come from lm-eval")

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """The task, what earlier agents wrote, the role's instruction."""
        return compose(ROLES, node, filled, query="Task:", observed="Observed:")

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        """Nothing is observed."""
        return None

    def score(self, sample: Sample, final_output: str) -> Score:
        """The harness scores; this only hands the text on."""
        return Score(False, final_output, sample.answer)
