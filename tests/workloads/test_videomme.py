"""Video-MME: own clips, the benchmark's own rows beside real files, missing and malformed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvcmas.errors import UserError
from tests.workloads.films import write_clip
from workloads.base import Slot
from workloads.videomme import VideoMME
from workloads.videomme_clips import LENGTH, DrawnClip
from workloads.vision_samples import VisualSample
from workloads.vision_shapes import COLOURS
from workloads.vision_video import sample_evenly

WORK = VideoMME(questions=40)


def samples_of(workload: VideoMME, split: str = "test", seed: int = 0) -> list[VisualSample]:
    made = workload.load("procedural", split=split, seed=seed).samples
    return [sample for sample in made if isinstance(sample, VisualSample)]


# Own clips


def test_one_seed_gives_one_set_and_splits_share_nothing() -> None:
    first, again = WORK.load("procedural"), WORK.load("procedural")
    assert first.sha256 == again.sha256 and "not Video-MME" in first.label
    assert WORK.load("procedural", seed=1).sha256 != first.sha256
    prints = [
        {(s.media.fingerprint(), s.question) for s in samples_of(WORK, split)}
        for split in ("test", "calibration")
    ]
    assert len(prints[0]) == len(prints[1]) == 40 and not prints[0] & prints[1]


def middle(frame: np.ndarray, colour: str) -> np.ndarray:
    """Where the pixels of a colour lie, ``[y, x]``."""
    return np.argwhere((frame == COLOURS[colour]).all(axis=2)).mean(axis=0)


def colours_of(frame: np.ndarray) -> set[str]:
    return {c for c, rgb in COLOURS.items() if (frame == rgb).all(axis=2).any()}


def test_answers_can_be_read_from_the_sampled_frames() -> None:
    """The frames the model gets decide every question; a single one never does."""
    for sample in samples_of(WORK):
        frames = sample.media.frames()
        assert len(frames) == 32 and sample.answer in sample.asked.choices
        shown = [colours_of(frame) for frame in frames]
        if sample.meta["task"] == "motion":
            (colour,) = shown[0]
            dy, dx = middle(frames[-1], colour) - middle(frames[0], colour)
            across = abs(dx) > abs(dy)
            ways = ("left", "right") if across else ("up", "down")
            assert ways[int((dx if across else dy) > 0)] == sample.answer
        elif sample.meta["task"] == "order":
            order = list(dict.fromkeys(next(iter(colours)) for colours in shown))
            place = ("first", "second", "third", "last").index(sample.asked.text.split()[-1][:-1])
            assert order[place] == sample.answer
        elif sample.meta["task"] == "count":
            places = [
                (colour, *middle(frame, colour))
                for frame, colours in zip(frames, shown, strict=True)
                for colour in colours
            ]
            assert len(set(places)) == int(sample.answer)
        else:
            assert len(shown[0]) == 1 and len(shown[-1]) == 2


def test_a_clip_of_our_own_is_sampled_like_a_file(tmp_path: Path) -> None:
    """Both ways to frames: drawn ones, and the same ones through a codec and PyAV."""
    sample = samples_of(WORK)[0]
    assert isinstance(sample.media, DrawnClip)
    drawn = [sample.media.film.frame(i) for i in range(LENGTH)]
    assert all(
        np.array_equal(a, b)
        for a, b in zip(sample.media.frames(), sample_evenly(drawn, 32), strict=True)
    )
    rows = [ROW]
    write(tmp_path, rows)
    write_clip(tmp_path / "data" / "abc.mp4", drawn)
    (read,) = VideoMME().load(tmp_path).samples
    assert isinstance(read, VisualSample)
    decoded = read.media.frames()
    errors = [
        np.abs(a.astype(int) - b).mean()
        for a, b in zip(decoded, sample.media.frames(), strict=True)
    ]
    assert max(errors) < 6


# The benchmark's own

ROW = {
    "video_id": "001",
    "videoID": "abc",
    "question_id": "001-1",
    "duration": "short",
    "task_type": "Counting Problem",
    "question": "How many?",
    "options": ["A. One.", "B. Two.", "C. Three.", "D. None"],
    "answer": "C",
}


def write(folder: Path, rows: list[Any], *, parquet: bool = False) -> Path:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    if parquet:
        (folder / "videomme").mkdir()
        table = pa.Table.from_pylist(rows)
        pq.write_table(table, folder / "videomme" / "test-00000-of-00001.parquet")
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "videomme.jsonl").write_text(lines)
    return folder


@pytest.mark.parametrize("parquet", [False, True])
@pytest.mark.parametrize("place", ["data", "video", "."])
def test_rows_beside_clips(tmp_path: Path, parquet: bool, place: str) -> None:
    other = {**ROW, "videoID": "gone", "question_id": "002-1"}
    write(tmp_path, [ROW, other], parquet=parquet)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "abc.webm").write_bytes(b"a clip")
    data = VideoMME(frames=8).load(tmp_path)
    (sample,) = data.samples
    assert isinstance(sample, VisualSample)
    assert sample.question == (
        "How many?\n(A) One.\n(B) Two.\n(C) Three.\n(D) None\nAnswer with the letter of a choice."
    )
    assert (sample.id, sample.answer, sample.asked.choices[3]) == (
        "videomme-001-1",
        "Three.",
        "None",
    )
    assert sample.meta == {"task": "Counting Problem", "duration": "short"}
    assert data.missing == ("videomme-002-1 (gone.mp4)",)
    with pytest.raises(UserError, match=r"cannot read video abc\.webm: "):
        sample.media.check()


def test_the_first_questions_are_not_all_about_short_clips(tmp_path: Path) -> None:
    lengths = [name for name in ("short", "medium", "long") for _ in range(20)]
    rows = [
        {**ROW, "question_id": f"{i:03d}-1", "duration": duration}
        for i, duration in enumerate(lengths)
    ]
    write(tmp_path, rows)
    (tmp_path / "data" / "abc.mp4").write_bytes(b"a clip")
    samples = VideoMME().load(tmp_path).samples
    assert len({s.id for s in samples}) == len(rows)
    for few in (samples[:15], samples[-15:]):
        assert {s.meta["duration"] for s in few} == {"short", "medium", "long"}


def test_clips_may_lie_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "rows", [ROW])
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "abc.mp4").write_bytes(b"a clip")
    (sample,) = VideoMME(videos=str(tmp_path / "clips")).load(tmp_path / "rows").samples
    assert sample.id == "videomme-001-1"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"options": ["A. One"]}, "'options' must list 4 texts"),
        ({"options": None}, "'options' must list 4 texts"),
        ({"answer": "E"}, "the answer must be one of ABCD, not 'E'"),
        ({"question": ""}, "'question' must be a text"),
        ({}, "not one of its 1 questions has its video, for instance videomme-001-1 (abc.mp4)"),
    ],
)
def test_bad_data_gets_one_clear_line(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(UserError) as raised:
        VideoMME().load(write(tmp_path, [{**ROW, **changes}]))
    assert complaint in str(raised.value) and "\n" not in str(raised.value)


def test_other_places_without_data(tmp_path: Path) -> None:
    cases = [
        (VideoMME(), tmp_path, "test", "has no videomme.jsonl or"),
        (VideoMME(), tmp_path / "none", "test", "no such data file or directory"),
        (VideoMME(), tmp_path, "calibration", "has the split test"),
        (VideoMME(), "procedural", "train", "splits test and calibration"),
        (VideoMME(), "hub", "test", "name the folder of the clips"),
        (VideoMME(videos=str(tmp_path / "no")), "hub", "test", "no folder of clips at"),
    ]
    for workload, data, split, complaint in cases:
        with pytest.raises(UserError, match=complaint):
            workload.load(data, split=split)
    (tmp_path / "test-00000-of-00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"cannot read .*parquet"):
        VideoMME().load(tmp_path)


# Agents


def test_agents_read_the_clip_and_each_other() -> None:
    nodes = WORK.workflow.nodes
    assert WORK.agents == ("Knowledgeable Expert", "Wiki Searcher", "Critic", "FinalRefer")
    message = WORK.message(nodes[3], ("q", "out0", "out1", "out2"))
    assert [p.name for p in message.user if isinstance(p, Slot)] == ["q", "out0", "out1", "out2"]
    sample = samples_of(WORK)[0]
    assert WORK.observe(nodes[1], "anything", sample) is None
    letter = "ABCD"[sample.asked.choices.index(sample.answer)]
    score = WORK.score(sample, f"The answer is ({letter}).")
    assert (score.correct, score.extracted, score.notes) == (True, letter, {"scorer": "videomme-1"})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"frames": 0}, "start at 1"), ({"topology": "ring"}, "unknown topology 'ring'")],
)
def test_bad_settings(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        VideoMME(**settings)
