"""HumanEval with three task agents and a referee (paper B.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcmas.engine.workflow import Node
from kvcmas.errors import UserError
from workloads.agents import Team, compose
from workloads.base import Dataset, Message, Role, Sample, Score
from workloads.data import HubSource, Row, dataset, find_file, read_hub, read_jsonl
from workloads.humaneval_prompts import CODER, PROMPTS
from workloads.humaneval_run import PASSED, check, feedback
from workloads.sandbox import Limits
from workloads.solutions import NO_CODE, find_solution

HUB = HubSource(
    "openai/openai_humaneval", "openai_humaneval", "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544"
)
_FILES = ("HumanEval.jsonl.gz", "HumanEval.jsonl")
_FIELDS = ("task_id", "prompt", "test", "entry_point")


@dataclass(frozen=True)
class HumanEval(Team):
    """HumanEval: Project Manager, Algorithm Designer, Programming Expert and FinalRefer.

    The Programming Expert's code is run on the examples in the prompt's docstring, and what came
    out is shared. The official checks are the gold answer: they only ever meet the sandbox.

    Attributes:
        prompts: ``steps`` or ``brief``, see ``humaneval_prompts``.
        limits: of the programs, examples and checks alike.
        observation_chars: where the text of an examples' run is cut.

    Raises:
        UserError: a setting out of range.
    """

    prompts: str = "steps"
    limits: Limits = field(default_factory=Limits)
    observation_chars: int = 512

    def __post_init__(self) -> None:
        if self.prompts not in PROMPTS:
            raise UserError(f"humaneval: prompts are {', '.join(PROMPTS)}, not {self.prompts!r}")
        if self.observation_chars < 1:
            raise UserError("humaneval: observation_chars starts at 1")
        super().__post_init__()

    @property
    def name(self) -> str:
        """The registry's name of the workload."""
        return "humaneval"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The agents in order."""
        return PROMPTS[self.prompts]

    def load(self, data: str | Path, *, split: str = "test", seed: int = 0) -> Dataset:
        """The 164 problems, the only split there is; ``seed`` changes nothing.

        ``data`` is ``hub``, or a directory or file with HumanEval's own lines.

        Raises:
            UserError: an unknown split, missing data, or a malformed row (its place is named).
        """
        if split != "test":
            raise UserError(f"humaneval has the split test only, not {split!r}")
        if data == "procedural":
            raise UserError(
                "humaneval has no procedural problems; give --data package, hub or a directory"
            )
        if data == "hub":
            return dataset(read_hub(HUB, "test", _sample), "hub", str(HUB))
        path = find_file(data, self.name, _FILES)
        return dataset(read_jsonl(path, _FIELDS, _sample), "local", path.name)

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """The function's head, what earlier agents wrote, the role's instruction."""
        return compose(
            self.roles,
            node,
            filled,
            query="Function to complete:",
            observed="The code was run on the examples in the docstring:",
        )

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        """What the docstring's examples made of the Programming Expert's code; None without any."""
        if node.agent != CODER:
            return None
        function = sample.meta["entry_point"]
        solution = find_solution(sample.question, function, output)
        if solution is None:
            return None
        told = feedback(solution, sample.question, function, self.limits)
        return told[: self.observation_chars]

    def score(self, sample: Sample, final_output: str) -> Score:
        """Pass@1: the referee's function against the official checks, run in the sandbox."""
        solution = find_solution(sample.question, sample.meta["entry_point"], final_output)
        if solution is None:
            return Score(False, None, PASSED, NO_CODE)
        outcome = check(solution, sample.answer, self.limits)
        return Score(outcome == PASSED, outcome, PASSED, notes={"solution": solution})


def _sample(number: int, row: Row) -> Sample:
    function = row["entry_point"]
    return Sample(
        row["task_id"],
        row["prompt"],
        f"{row['test'].strip()}\n\ncheck({function})",
        {"entry_point": function},
    )
