"""GSM8K with three task agents and a referee (roles of paper B.1, prompts in our own words)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcmas.engine.workflow import QUERY, Node, Workflow, fully_connected
from kvcmas.errors import UserError
from workloads.answers import gold_number, score_number
from workloads.base import Dataset, DataSource, Message, Role, Sample, Score, Slot, Text
from workloads.data import HubSource, Row, dataset, find_file, hub_rows, jsonl_rows
from workloads.procedural import problems
from workloads.sandbox import Execution, Limits, extract_code, run_python

HUB = HubSource("openai/gsm8k", "main", "cc7b047b6e5bb11b4f1af84efc572db110a51b3c")
# GSM8K's own names for our splits
_FILES = {"test": "test", "calibration": "train"}

ROLES = (
    Role(
        "Math Solver",
        "You solve math word problems. Write one short equation, then the answer.\n"
        "Example: 3 + 4 = 7. The answer is 7.",
        "Write the equation and the answer.",
    ),
    Role(
        "Mathematical Analyst",
        "You check math word problems. Name the operation, then write the equation and the answer.\n"
        "Example: We subtract: 9 - 4 = 5. The answer is 5.",
        "Write the operation, the equation and the answer.",
    ),
    Role(
        "Programming Expert",
        "You write Python. Print the answer of the problem with one short program.\n"
        "Example:\n```python\nprint(3 + 4)\n```",
        "Write only the program.",
    ),
    Role(
        "FinalRefer",
        "You give the final answer to a math problem. Other agents have tried it; some may be wrong.\n"
        "Reply with one sentence: The answer is N.",
        "Give the final answer. Reply: The answer is N.",
    ),
)
_CODER = 2


@dataclass(frozen=True)
class GSM8K:
    """The GSM8K workload.

    Attributes:
        difficulty: 1 to 4, of procedural problems only.
        problems: how many procedural problems a split has.
        limits: of the programs that the Programming Expert writes.
        observation_chars: where the text of a program's result is cut.
    """

    difficulty: int = 1
    problems: int = 1000
    limits: Limits = field(default_factory=Limits)
    observation_chars: int = 512
    name: str = field(default="gsm8k", init=False)
    workflow: Workflow = field(default_factory=lambda: fully_connected(len(ROLES)), init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.difficulty <= 4:
            raise UserError(f"gsm8k: difficulty goes from 1 to 4, not {self.difficulty}")
        if self.problems < 1 or self.observation_chars < 1:
            raise UserError("gsm8k: problems and observation_chars start at 1")

    def load(self, data: str | Path, *, split: str = "test", seed: int = 0) -> Dataset:
        """Samples of ``split`` (``test``, or ``calibration``: GSM8K's training questions).

        ``data`` is ``hub``, ``procedural``, or a directory or file with GSM8K's own lines. ``seed`` selects
        procedural problems; the other sources have one order.

        Raises:
            UserError: an unknown split, data that is missing, or a malformed row (file and line).
        """
        if split not in _FILES:
            raise UserError(f"gsm8k has the splits {' and '.join(_FILES)}, not {split!r}")
        if data == "procedural":
            made = problems(split, difficulty=self.difficulty, count=self.problems, seed=seed)
            return dataset(made, "procedural", f"procedural (difficulty {self.difficulty}, not GSM8K)")
        if data == "hub":
            return _dataset(hub_rows(HUB, _FILES[split]), split, "hub", str(HUB))
        path = find_file(data, (f"{_FILES[split]}.jsonl",))
        return _dataset(list(jsonl_rows(path, ("question", "answer"))), split, "local", path.name)

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """The problem, what earlier agents wrote (as far as ``filled``), and the role's instruction."""
        role = ROLES[node.agent]
        user: list[Text | Slot] = []
        for slot in filled:
            user += [Text(_heading(slot, first=not user)), Slot(slot)]
        return Message(role.system, (*user, Text(f"\n\n{role.instruction}")))

    def observe(self, node: Node, output: str) -> str | None:
        """What the Programming Expert's program printed, or how it failed; None without a program."""
        if node.agent != _CODER or (code := extract_code(output)) is None:
            return None
        return describe(run_python(code, self.limits))[: self.observation_chars]

    def score(self, sample: Sample, final_output: str) -> Score:
        """The last number of FinalRefer's text against the gold answer."""
        return score_number(sample.answer, final_output)


def _heading(slot: str, *, first: bool) -> str:
    if slot == QUERY:
        text = "Problem:"
    elif slot.startswith("obs"):
        text = "The program printed:"
    else:
        text = f"{ROLES[int(slot.removeprefix('out'))].name} wrote:"
    return f"{text}\n" if first else f"\n\n{text}\n"


def describe(execution: Execution) -> str:
    """One short text for the agents. Addresses are masked: they differ from run to run."""
    printed = re.sub(r"0x[0-9a-f]{6,}", "0x...", execution.stdout.strip())
    last_line = (execution.stderr.strip().splitlines() or [""])[-1]
    return {
        "ok": printed or "nothing",
        "error": f"error: {last_line}",
    }.get(execution.status, execution.status)


def _dataset(rows: Sequence[Row], split: str, source: DataSource, label: str) -> Dataset:
    return dataset([_sample(row, f"gsm8k-{split}-{i:04d}") for i, row in enumerate(rows)], source, label)


def _sample(row: Mapping[str, str], name: str) -> Sample:
    return Sample(name, row["question"].strip(), gold_number(row["answer"]))
