"""MathVista with three task agents and a referee (paper B.1), for vision-language models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvcmas.engine.workflow import Node
from kvcmas.errors import UserError
from workloads.agents import Team, compose
from workloads.base import Dataset, Message, Role, Sample, Score
from workloads.data import HubSource, Row, find_file, parsed, read_hub
from workloads.gsm8k import describe
from workloads.mathvista_prompts import CODER, ROLES
from workloads.sandbox import Limits, extract_code, run_python
from workloads.vision_drawn import Drawn, asked_pictures
from workloads.vision_media import ImageBytes, ImageFile, Media
from workloads.vision_questions import Question
from workloads.vision_samples import VisualSample, score_visual, visual_dataset

HUB = HubSource("AI4Math/MathVista", None, "2b6ad69445fbb5695c9b165475e8decdbeb97747")
# Changes whenever the same answer could be scored differently.
SCORER = "mathvista-1"
_FILE = "testmini.json"
_IMAGE = "decoded_image"


@dataclass(frozen=True)
class MathVista(Team):
    """MathVista: Math Solver, Mathematical Analyst, Programming Expert and FinalRefer.

    Picture and question are the shared query. What the Programming Expert's program prints is
    shared too, as in GSM8K.

    Attributes:
        problems: how many pictures of our own a split has.
        limits: of the programs that the Programming Expert writes.
        observation_chars: where the text of a program's result is cut.

    Raises:
        UserError: a setting out of range.
    """

    problems: int = 200
    limits: Limits = field(default_factory=Limits)
    observation_chars: int = 512

    def __post_init__(self) -> None:
        if self.problems < 1 or self.observation_chars < 1:
            raise UserError("mathvista: problems and observation_chars start at 1")
        super().__post_init__()

    @property
    def name(self) -> str:
        """The registry's name of the workload."""
        return "mathvista"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The agents in order."""
        return ROLES

    def load(self, data: str | Path, *, split: str = "test", seed: int = 0) -> Dataset:
        """Samples of ``split``: ``test`` is testmini, the only part with public answers.

        ``data`` is ``hub``, ``procedural`` (our own pictures, which also have a ``calibration``
        split), or a directory with ``testmini.json`` and the images it names. Questions whose
        image is not there are listed in the dataset's ``missing``. ``seed`` selects procedural
        pictures.

        Raises:
            UserError: an unknown split, missing data, no image at all, or a malformed row.
        """
        if data == "procedural":
            return self._drawn(split, seed)
        if split != "test":
            raise UserError(f"mathvista has answers for the split test only, not {split!r}")
        if data == "hub":
            samples = read_hub(HUB, "testmini", _from_hub, encoded=(_IMAGE,))
            return visual_dataset(samples, "hub", str(HUB))
        path = find_file(data, self.name, (_FILE,))
        return visual_dataset(_from_file(path), "local", path.name)

    def _drawn(self, split: str, seed: int) -> Dataset:
        try:
            drawn = asked_pictures(split, count=self.problems, seed=seed)
        except ValueError as error:
            raise UserError(f"mathvista: {error}") from error
        samples = []
        for number, one in enumerate(drawn):
            name = f"drawn-s{seed}-{split}-{number:04d}"
            picture = Drawn(name, one.subject)
            samples.append(VisualSample.of(name, picture, one.question, {"task": one.task}))
        return visual_dataset(samples, "procedural", "procedural (own pictures, not MathVista)")

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """Picture and problem, what earlier agents wrote, the role's instruction."""
        return compose(ROLES, node, filled, query="Problem:", observed="The program printed:")

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        """What the Programming Expert's program printed, or how it failed; None without one."""
        if node.agent != CODER or (code := extract_code(output)) is None:
            return None
        return describe(run_python(code, self.limits))[: self.observation_chars]

    def score(self, sample: Sample, final_output: str) -> Score:
        """FinalRefer's text against the gold answer, by the rules for the answer's type."""
        return score_visual(sample, final_output, SCORER)


def _from_hub(number: int, row: Row) -> VisualSample:
    return _sample(row, ImageBytes(str(row["image"]), row[_IMAGE]["bytes"]))


def _from_file(path: Path) -> list[VisualSample]:
    """Every question of MathVista's own file, which is one object keyed by problem.

    Raises:
        UserError: an unreadable file, or a malformed row; the problem is named.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(rows, dict) or not rows:
        raise UserError(f"{path}: an object of problems is expected")

    def sample(number: int, row: Row) -> VisualSample:
        if not isinstance(row, dict) or not isinstance(row.get("image"), str):
            raise ValueError("the field 'image' must be a text")
        return _sample(row, ImageFile(path.parent / row["image"], row["image"]))

    return [
        parsed(sample, number, row, f"{path.name} problem {pid}")
        for number, (pid, row) in enumerate(rows.items())
    ]


def _sample(row: Row, media: Media) -> VisualSample:
    """The sample of a row.

    Raises:
        ValueError: a field is missing or malformed.
    """
    for name in ("pid", "question", "answer", "answer_type"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise ValueError(f"the field {name!r} must be a text that is not empty")
    precision = row.get("precision")
    question = Question(
        text=row["question"].strip(),
        answer=row["answer"].strip(),
        answer_type=row["answer_type"],
        choices=tuple(str(choice).strip() for choice in row.get("choices") or ()),
        unit=row.get("unit") or None,
        precision=None if precision is None else int(precision),
    )
    task = (row.get("metadata") or {}).get("task")
    return VisualSample.of(f"mathvista-{row['pid']}", media, question, {"task": task})
