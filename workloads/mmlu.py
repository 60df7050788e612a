"""MMLU with three task agents and a referee (paper B.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from scipy.special import softmax

from kvcmas.engine.workflow import Node
from kvcmas.errors import UserError
from workloads.agents import Team, compose
from workloads.base import Dataset, Message, Role, Sample, Score
from workloads.data import HubSource, Row, dataset, find_file, mixed, read_hub, read_jsonl
from workloads.letters import score_letter
from workloads.mmlu_prompts import EXPERT, PROMPTS
from workloads.quiz import LETTERS, question_text, questions
from workloads.retrieval import LocalPassages, Passages, search_terms
from workloads.wikipedia import WikipediaPassages

HUB = HubSource("cais/mmlu", "all", "c30699e8356da336a370243923dbaf21066bb9fe")
Questions = Literal["kvcomm153", "validation", "test"]
Scoring = Literal["text", "likelihood"]
VALIDATION, CHOSEN, CHOICE_SEED = 1531, 153, 888


@dataclass(frozen=True)
class MMLU(Team):
    """MMLU: Knowledgeable Expert, Wiki Searcher, Critic and FinalRefer.

    The expert names what to look up; what was found is a task observation for the others.

    Attributes:
        questions: ``kvcomm153`` are the 153 validation questions that KVComm evaluates, the others
            whole splits.
        scoring: what decides: the letter in the referee's ``text``, or the ``likelihood`` of the
            four letters as its reply. Both are recorded.
        retrieval: ``none``, ``wikipedia``, or a JSON-lines file with ``title`` and ``text``.
        passages: how many are shown at most.
        observation_chars: where the passages' text is cut.
        prompts: ``short`` or ``steps``, see ``mmlu_prompts``.
        problems: how many procedural questions a split has.

    Raises:
        UserError: a setting out of range, or a file of passages that cannot be read.
    """

    questions: Questions = "kvcomm153"
    scoring: Scoring = "text"
    retrieval: str = "none"
    passages: int = 2
    observation_chars: int = 2048
    prompts: str = "short"
    problems: int = 1000

    def __post_init__(self) -> None:
        for setting, known in (
            ("questions", get_args(Questions)),
            ("scoring", get_args(Scoring)),
            ("prompts", tuple(PROMPTS)),
        ):
            if getattr(self, setting) not in known:
                raise UserError(
                    f"mmlu: {setting} is one of {', '.join(known)}, not {getattr(self, setting)!r}"
                )
        if min(self.passages, self.observation_chars, self.problems) < 1:
            raise UserError("mmlu: passages, observation_chars and problems start at 1")
        super().__post_init__()
        self._source  # noqa: B018

    @property
    def name(self) -> str:
        """The registry's name of the workload."""
        return "mmlu"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The agents in order."""
        return PROMPTS[self.prompts]

    @property
    def choices(self) -> tuple[str, ...]:
        """The four letters."""
        return tuple(LETTERS)

    def load(self, data: str | Path, *, split: str = "test", seed: int = 0) -> Dataset:
        """Samples of ``split``: ``test`` (see ``questions``), or ``calibration`` (MMLU's dev).

        ``data`` is ``hub``, ``procedural``, or a directory or file with one question a line:
        ``question``, ``subject``, ``choices`` and the ``answer``'s index. ``seed`` selects
        procedural questions; the other sources have one order, whole splits a mixed one.

        Raises:
            UserError: an unknown split, missing data, or a malformed row (its place is named).
        """
        if split not in ("test", "calibration"):
            raise UserError(f"mmlu has the splits test and calibration, not {split!r}")
        if data == "procedural":
            made = questions(split, count=self.problems, seed=seed)
            return dataset(made, "procedural", "procedural questions (not MMLU)")
        part = "dev" if split == "calibration" else self.questions
        file = "validation" if part == "kvcomm153" else part

        def sample(number: int, row: Row) -> Sample:
            return _sample(f"mmlu-{file}-{number:04d}", row, self._source)

        if data == "hub":
            return dataset(_chosen(part, read_hub(HUB, file, sample)), "hub", f"{HUB} {part}")
        path = find_file(data, self.name, (f"{file}.jsonl",))
        rows = read_jsonl(path, ("question", "subject"), sample)
        return dataset(_chosen(part, rows), "local", f"{path.name} {part}")

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """The question, what earlier agents wrote, the role's instruction."""
        return compose(
            PROMPTS[self.prompts], node, filled, query="Question:", observed="Passages found:"
        )

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        """Passages for the expert's search terms, or for the question where it named none."""
        if node.agent != EXPERT or self._source is None:
            return None
        terms = search_terms(output) or [sample.question.partition("\n")[0]]
        found = self._source.find(terms, self.passages)
        text = "\n\n".join(f"{passage.title}: {passage.text}" for passage in found)
        return text[: self.observation_chars] or None

    def score(self, sample: Sample, final_output: str) -> Score:
        """The letter that the referee's text states."""
        return score_letter(sample.answer, final_output)

    def choose(self, sample: Sample, final_output: str, likelihoods: Sequence[float]) -> Score:
        """Score by ``scoring``; the notes hold both, and the letters' likelihoods.

        ``nats`` are log-probabilities over the whole vocabulary, of the letter alone as the start
        of the reply; ``shares`` are normalised over the four letters. The highest wins, the first
        of equals.
        """
        text = score_letter(sample.answer, final_output)
        best = LETTERS[max(range(len(LETTERS)), key=lambda i: likelihoods[i])]
        shares = softmax(np.asarray(likelihoods, dtype=np.float64))
        notes = {
            "text": {"extracted": text.extracted, "correct": text.correct},
            "likelihood": {
                "extracted": best,
                "correct": best == sample.answer,
                "nats": dict(zip(LETTERS, likelihoods, strict=True)),
                "shares": dict(zip(LETTERS, map(float, shares), strict=True)),
            },
        }
        if self.scoring == "text":
            return Score(text.correct, text.extracted, text.expected, text.failure, notes)
        return Score(best == sample.answer, best, sample.answer, None, notes)

    @cached_property
    def _source(self) -> Passages | None:
        if self.retrieval == "none":
            return None
        if self.retrieval == "wikipedia":
            return WikipediaPassages()
        return LocalPassages(Path(self.retrieval))


def chosen_rows() -> list[int]:
    """Row numbers of KVComm's 153 questions among the 1531 of the validation split, in its order.

    That order comes from the split's files sorted by name, as in the release and on the hub.
    """
    order = np.random.default_rng(CHOICE_SEED).permutation(VALIDATION)
    return [int(row) for row in order[:CHOSEN]]


def _chosen(part: str, samples: Sequence[Sample]) -> Sequence[Sample]:
    if part != "kvcomm153":
        return mixed(samples)
    subjects = [sample.meta["subject"] for sample in samples]
    if len(samples) != VALIDATION or subjects != sorted(subjects):
        raise UserError(
            f"kvcomm153 is chosen from the {VALIDATION} validation questions in the order of their"
            f" subjects; these are {len(samples)} questions or in another order; set"
            " questions=validation"
        )
    return [samples[row] for row in chosen_rows()]


def _sample(id_: str, row: Row, source: Passages | None) -> Sample:
    choices, answer = row.get("choices"), row.get("answer")
    if not (
        isinstance(choices, list)
        and len(choices) == len(LETTERS)
        and all(isinstance(choice, str) for choice in choices)
    ):
        raise ValueError(f"the field 'choices' must be a list of {len(LETTERS)} texts")
    if isinstance(answer, bool) or not isinstance(answer, int) or answer not in range(len(LETTERS)):
        raise ValueError("the field 'answer' must be the index of a choice, 0 to 3")
    meta = {"subject": row["subject"]}
    if source is not None and source.sha256 is not None:
        meta["passages_sha256"] = source.sha256
    return Sample(id_, question_text(row["question"], choices), LETTERS[answer], meta)
