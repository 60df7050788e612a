"""GSM8K with three task agents and a referee (paper B.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcmas.engine.workflow import Node
from kvcmas.errors import UserError
from workloads.agents import Team, compose
from workloads.answers import gold_number, score_number
from workloads.base import Dataset, Message, Role, Sample, Score
from workloads.data import HubSource, Row, dataset, find_file, read_hub, read_jsonl
from workloads.gsm8k_prompts import CODER, PROMPTS
from workloads.procedural import LEVELS, problems
from workloads.sandbox import Execution, Limits, extract_code, masked, run_python

HUB = HubSource("openai/gsm8k", "main", "cc7b047b6e5bb11b4f1af84efc572db110a51b3c")
_GSM8K_SPLITS = {"test": "test", "calibration": "train"}
_FIELDS = ("question", "answer")


@dataclass(frozen=True)
class GSM8K(Team):
    """The GSM8K workload: Math Solver, Mathematical Analyst, Programming Expert and FinalRefer.

    Attributes:
        difficulty: 1 to 4, of procedural problems only.
        problems: how many procedural problems a split has.
        prompts: ``short``, ``brief`` or ``steps``, see ``gsm8k_prompts``.
        limits: of the programs that the Programming Expert writes.
        observation_chars: where the text of a program's result is cut.

    Raises:
        UserError: a setting out of range.
    """

    difficulty: int = 1
    problems: int = 1000
    prompts: str = "short"
    limits: Limits = field(default_factory=Limits)
    observation_chars: int = 512

    def __post_init__(self) -> None:
        if self.difficulty not in LEVELS:
            raise UserError(
                f"gsm8k: difficulty goes from 1 to {len(LEVELS)}, not {self.difficulty}"
            )
        if self.prompts not in PROMPTS:
            raise UserError(f"gsm8k: prompts are {', '.join(PROMPTS)}, not {self.prompts!r}")
        if self.problems < 1 or self.observation_chars < 1:
            raise UserError("gsm8k: problems and observation_chars start at 1")
        super().__post_init__()

    @property
    def name(self) -> str:
        """The registry's name of the workload."""
        return "gsm8k"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The agents in order."""
        return PROMPTS[self.prompts]

    def load(self, data: str | Path, *, split: str = "test", seed: int = 0) -> Dataset:
        """Samples of ``split``: ``test``, or ``calibration``, which is GSM8K's training split.

        ``data`` is ``hub``, ``procedural``, or a directory or file with GSM8K's own lines. ``seed``
        selects procedural problems; the other sources have one order.

        Raises:
            UserError: an unknown split, missing data, or a malformed row (its place is named).
        """
        if split not in _GSM8K_SPLITS:
            raise UserError(f"gsm8k has the splits {' and '.join(_GSM8K_SPLITS)}, not {split!r}")
        if data == "procedural":
            made = problems(split, difficulty=self.difficulty, count=self.problems, seed=seed)
            return dataset(
                made, "procedural", f"procedural (difficulty {self.difficulty}, not GSM8K)"
            )

        def sample(number: int, row: Row) -> Sample:
            return Sample(
                f"gsm8k-{split}-{number:04d}", row["question"].strip(), gold_number(row["answer"])
            )

        if data == "hub":
            return dataset(read_hub(HUB, _GSM8K_SPLITS[split], sample), "hub", str(HUB))
        path = find_file(data, self.name, (f"{_GSM8K_SPLITS[split]}.jsonl",))
        return dataset(read_jsonl(path, _FIELDS, sample), "local", path.name)

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """The problem, what earlier agents wrote (as far as ``filled``), the role's instruction."""
        return compose(
            PROMPTS[self.prompts],
            node,
            filled,
            query="Problem:",
            observed="The program printed:",
        )

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        """What the Programming Expert's program printed, or how it failed; None without one."""
        if node.agent != CODER or (code := extract_code(output)) is None:
            return None
        return describe(run_python(code, self.limits))[: self.observation_chars]

    def score(self, sample: Sample, final_output: str) -> Score:
        """The last number of FinalRefer's text against the gold answer."""
        return score_number(sample.answer, final_output)


def describe(execution: Execution) -> str:
    """One short text for the agents."""
    if execution.status == "ok":
        return masked(execution.stdout.strip()) or "nothing"
    if execution.status == "error":
        error = re.match(r"[\w.]+", (execution.stderr.strip().splitlines() or [""])[-1])
        return f"nothing, it failed with {error[0] if error else 'an error'}"
    return {
        "timeout": "nothing, it took too long",
        "output_limit": "too much to show",
        "killed": "nothing, it used too much time or memory",
    }[execution.status]
