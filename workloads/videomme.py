"""Video-MME with three task agents and a referee (paper B.1), for vision-language models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcmas.engine.workflow import Node
from kvcmas.errors import UserError
from workloads.agents import Team, compose
from workloads.base import Dataset, Message, Role, Sample, Score
from workloads.data import HubSource, Row, find_file, mixed, parsed, read_hub, read_jsonl
from workloads.videomme_clips import DrawnClip, asked_clips
from workloads.videomme_prompts import ROLES
from workloads.vision_questions import Question
from workloads.vision_samples import VisualSample, score_visual, visual_dataset
from workloads.vision_video import FRAMES, Clip

HUB = HubSource("lmms-lab/Video-MME", "videomme", "ead1408f75b618502df9a1d8e0950166bf0a2a0b")
# Changes whenever the same answer could be scored differently.
SCORER = "videomme-1"
_FILES = (
    "videomme.jsonl",
    "test-00000-of-00001.parquet",
    "videomme/test-00000-of-00001.parquet",
)
_FIELDS = ("videoID", "question_id", "question", "answer")
_LETTERS = "ABCD"
# Where the benchmark's archives and its users put clips, beside the file of questions.
_FOLDERS = ("data", "video", "videos", ".")
_ENDINGS = (".mp4", ".mkv", ".webm", ".avi", ".mov")


@dataclass(frozen=True)
class VideoMME(Team):
    """Video-MME: Knowledgeable Expert, Wiki Searcher, Critic and FinalRefer.

    Clip and question are the shared query; there are no subtitles and no observations.

    Attributes:
        questions: how many clips of our own a split has.
        frames: sampled from every clip.
        videos: folder of the clips, where they do not lie beside the file of questions.

    Raises:
        UserError: a setting out of range.
    """

    questions: int = 200
    frames: int = FRAMES
    videos: str = ""

    def __post_init__(self) -> None:
        if self.questions < 1 or self.frames < 1:
            raise UserError("videomme: questions and frames start at 1")
        super().__post_init__()

    @property
    def name(self) -> str:
        """The registry's name of the workload."""
        return "videomme"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The agents in order."""
        return ROLES

    def load(self, data: str | Path, *, split: str = "test", seed: int = 0) -> Dataset:
        """Samples of ``split``; Video-MME itself has ``test`` only.

        ``data`` is ``procedural`` (our own clips, which also have a ``calibration`` split), a
        directory or file with the questions and the clips beside it, or ``hub``, which has the
        questions: the clips must then lie in the folder ``videos``. Questions whose clip is not
        there are listed in the dataset's ``missing``. ``seed`` selects procedural clips; the others
        come in a mixed order (the benchmark's goes from short clips to long ones).

        Raises:
            UserError: an unknown split, missing data, no clip at all, or a malformed row.
        """
        if data == "procedural":
            return self._drawn(split, seed)
        if split != "test":
            raise UserError(f"videomme has the split test, not {split!r}")
        if data == "hub":
            if not self.videos:
                raise UserError(
                    "videomme: the hub has no clips as files; give --data DIR with questions and "
                    "clips, or name the folder of the clips in the workload's setting 'videos'"
                )
            clips = _find_clips([Path(self.videos)])
            rows = read_hub(HUB, "test", lambda n, row: self._sample(row, clips))
            return visual_dataset(mixed(rows), "hub", str(HUB))
        path = find_file(data, self.name, _FILES)
        folder = path.parent.parent if path.parent.name == "videomme" else path.parent
        places = [Path(self.videos)] if self.videos else [folder / name for name in _FOLDERS]
        return visual_dataset(mixed(self._read(path, _find_clips(places))), "local", path.name)

    def _drawn(self, split: str, seed: int) -> Dataset:
        try:
            drawn = asked_clips(split, count=self.questions, seed=seed)
        except ValueError as error:
            raise UserError(f"videomme: {error}") from error
        samples = []
        for number, one in enumerate(drawn):
            name = f"film-s{seed}-{split}-{number:04d}"
            clip = DrawnClip(name, one.subject, self.frames)
            samples.append(VisualSample.of(name, clip, one.question, {"task": one.task}))
        return visual_dataset(samples, "procedural", "procedural (own clips, not Video-MME)")

    def _read(self, path: Path, clips: dict[str, Path]) -> list[VisualSample]:
        def sample(number: int, row: Row) -> VisualSample:
            return self._sample(row, clips)

        if path.suffix != ".parquet":
            return read_jsonl(path, _FIELDS, sample)
        return [
            parsed(sample, number, row, f"{path.name} row {number}")
            for number, row in enumerate(_parquet(path))
        ]

    def _sample(self, row: Row, clips: dict[str, Path]) -> VisualSample:
        """The sample of a row.

        Raises:
            ValueError: a field is missing or malformed.
        """
        for name in _FIELDS:
            if not isinstance(row.get(name), str) or not row[name].strip():
                raise ValueError(f"the field {name!r} must be a text that is not empty")
        options, answer = row.get("options"), row["answer"].strip()
        if not isinstance(options, list) or len(options) != len(_LETTERS):
            raise ValueError(f"the field 'options' must list {len(_LETTERS)} texts")
        if answer not in _LETTERS:
            raise ValueError(f"the answer must be one of {_LETTERS}, not {answer!r}")
        choices = tuple(re.sub(r"^[A-D][.):]\s*", "", str(option)).strip() for option in options)
        question = Question(
            row["question"].strip(), choices[_LETTERS.index(answer)], "text", choices
        )
        video = row["videoID"].strip()
        path = clips.get(video, Path(f"{video}{_ENDINGS[0]}"))
        meta = {"task": row.get("task_type"), "duration": row.get("duration")}
        name = f"videomme-{row['question_id'].strip()}"
        return VisualSample.of(name, Clip(path, path.name, self.frames), question, meta)

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """Clip and question, what earlier agents wrote, the role's instruction."""
        return compose(ROLES, node, filled, query="Question about the clip:", observed="Found:")

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        """Nothing is looked up."""
        return None

    def score(self, sample: Sample, final_output: str) -> Score:
        """The choice that FinalRefer's text names against the right one."""
        return score_visual(sample, final_output, SCORER)


def _find_clips(folders: Sequence[Path]) -> dict[str, Path]:
    """Video files by their name without ending; the first folder that has one counts.

    Raises:
        UserError: none of the folders is there.
    """
    found: dict[str, Path] = {}
    there = [folder for folder in folders if folder.is_dir()]
    if not there:
        raise UserError(f"no folder of clips at {folders[0]}")
    for folder in there:
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in _ENDINGS:
                found.setdefault(path.stem, path)
    return found


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"cannot read {path}: {reason}") from error
    if not rows:
        raise UserError(f"{path} has no rows")
    return rows
