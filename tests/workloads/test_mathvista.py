"""MathVista: own pictures, the benchmark's own rows and images, what is missing or malformed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvcmas.errors import UserError
from workloads.base import Sample, Slot, Text
from workloads.mathvista import HUB, MathVista
from workloads.vision_drawn import Drawn
from workloads.vision_samples import VisualSample
from workloads.vision_shapes import COLOURS, BarChart, NumberLine, Scene

WORK = MathVista(problems=70)


def samples_of(workload: MathVista, split: str = "test", seed: int = 0) -> list[VisualSample]:
    made = workload.load("procedural", split=split, seed=seed).samples
    assert all(isinstance(sample, VisualSample) for sample in made)
    return [sample for sample in made if isinstance(sample, VisualSample)]


# Own pictures


def test_one_seed_gives_one_set_and_splits_share_nothing() -> None:
    first, again = WORK.load("procedural", split="test"), WORK.load("procedural", split="test")
    assert first.sha256 == again.sha256 and first.source == "procedural"
    assert "not MathVista" in first.label and first.missing == ()
    assert MathVista(problems=9).load("procedural").samples == first.samples[:9]
    assert WORK.load("procedural", seed=1).sha256 != first.sha256
    prints = [
        {(s.media.fingerprint(), s.question) for s in samples_of(WORK, split)}
        for split in ("test", "calibration")
    ]
    assert len(prints[0]) == len(prints[1]) == 70 and not prints[0] & prints[1]


def test_every_kind_of_answer_and_several_shapes_of_picture_occur() -> None:
    samples = samples_of(WORK)
    assert Counter(s.asked.answer_type for s in samples).keys() == {
        "integer",
        "text",
        "float",
        "list",
    }
    assert len({s.media.frames()[0].shape for s in samples}) > 10
    assert all(WORK.score(s, f"The answer is {s.answer}.").correct for s in samples)
    assert {s.meta["task"] for s in samples} > {"count", "colour", "arrow", "bars"}


def seen(sample: VisualSample, colour: str) -> np.ndarray:
    """Pixels of exactly one colour, read back from the picture."""
    return (sample.media.frames()[0] == COLOURS[colour]).all(axis=2)


def test_answers_can_be_read_from_the_pixels() -> None:
    """Independent of how questions are made: colours and positions as the picture shows them."""
    for sample in samples_of(WORK):
        assert sample.asked.choices or sample.meta["task"] not in ("colour", "position")
        assert isinstance(sample.media, Drawn)
        drawing = sample.media.drawing
        if sample.meta["task"] == "count":
            colour, shape = sample.question.split(" ")[2:4]
            assert isinstance(drawing, Scene)
            same = [i for i in drawing.items if (i.colour, f"{i.shape}s") == (colour, shape)]
            area = seen(sample, colour).sum()
            assert len(same) == int(sample.answer) and area > 20 * len(same)
        elif sample.meta["task"] == "position":
            assert isinstance(drawing, Scene)
            columns = {
                i.shape: seen(sample, i.colour).any(axis=0).nonzero()[0] for i in drawing.items
            }
            left = min(columns, key=lambda shape: columns[shape].min())
            right = max(columns, key=lambda shape: columns[shape].max())
            assert sample.answer == (left if "left" in sample.question else right)
        elif sample.meta["task"] == "arrow":
            assert isinstance(drawing, NumberLine)
            tip = seen(sample, "red").any(axis=0).nonzero()[0].mean()
            value = (tip - 14) / (drawing.width - 28) * drawing.top
            assert abs(value - float(sample.answer)) < 0.1
        elif sample.meta["task"] == "bars":
            assert isinstance(drawing, BarChart)
            heights = [
                seen(sample, c).any(axis=1).sum() for c in list(COLOURS)[: len(drawing.names)]
            ]
            assert (
                np.argsort(heights, kind="stable").tolist()
                == np.argsort(drawing.values, kind="stable").tolist()
            )


# The benchmark's own


ROW = {
    "pid": "7",
    "question": "How long?",
    "image": "images/7.png",
    "choices": None,
    "unit": None,
    "precision": 1.0,
    "answer": "1.2",
    "question_type": "free_form",
    "answer_type": "float",
    "metadata": {"task": "geometry"},
}


def write(folder: Path, rows: Any, images: tuple[str, ...] = ("7.png",)) -> Path:
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "testmini.json").write_text(json.dumps(rows))
    for name in images:
        Image.new("RGB", (30, 20), (9, 9, 9)).save(folder / "images" / name)
    return folder


def test_rows_and_images_of_a_folder(tmp_path: Path) -> None:
    rows = {"7": ROW, "8": {**ROW, "pid": "8", "image": "images/8.png"}}
    data = MathVista().load(write(tmp_path, rows))
    (sample,) = data.samples
    assert isinstance(sample, VisualSample)
    assert (sample.id, sample.answer, sample.meta) == ("mathvista-7", "1.2", {"task": "geometry"})
    assert sample.question == "How long?\nAnswer with a number rounded to 1 decimal."
    assert data.missing == ("mathvista-8 (images/8.png)",)
    assert (data.source, data.label) == ("local", "testmini.json")
    assert str(tmp_path) not in repr(data.missing)


def test_the_hash_follows_rows_and_pixels_not_the_folder(tmp_path: Path) -> None:
    one = MathVista().load(write(tmp_path / "a", {"7": ROW})).sha256
    assert MathVista().load(write(tmp_path / "b", {"7": ROW})).sha256 == one
    Image.new("RGB", (30, 20), (9, 9, 8)).save(tmp_path / "b/images/7.png")
    assert MathVista().load(tmp_path / "b").sha256 != one
    changed = write(tmp_path / "c", {"7": {**ROW, "answer": "1.3"}})
    assert MathVista().load(changed).sha256 != one


def test_the_shared_rows_and_images(shared: Path) -> None:
    data = MathVista().load(shared / "data" / "mathvista")
    assert (len(data.samples), len(data.missing)) == (23, 977)
    assert data.sha256 == MathVista().load(shared / "data").sha256
    for sample in data.samples:
        assert isinstance(sample, VisualSample)
        sample.media.check()
        assert sample.media.frames()[0].ndim == 3
        said = sample.answer if sample.asked.choices else f"The answer is {sample.answer}."
        assert MathVista().score(sample, said).correct, sample.id
        assert (
            sample.answer not in sample.question or sample.asked.choices or len(sample.answer) < 3
        )


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([], "an object of problems is expected"),
        ({}, "an object of problems is expected"),
        ({"7": "?"}, "problem 7: the field 'image' must be a text"),
        ({"7": {**ROW, "image": None}}, "problem 7: the field 'image' must be a text"),
        ({"7": {**ROW, "question": " "}}, "problem 7: the field 'question' must be a text"),
        ({"7": {**ROW, "answer": "long"}}, "problem 7: the answer 'long' is no number"),
        ({"7": {**ROW, "choices": ["1", "2"]}}, "problem 7: the answer '1.2' is none of"),
        ({"7": {**ROW, "image": "images/8.png"}}, "not one of its 1 questions has its image"),
    ],
)
def test_bad_data_gets_one_clear_line(tmp_path: Path, rows: Any, complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        MathVista().load(write(tmp_path, rows))
    assert complaint in str(raised.value) and "\n" not in str(raised.value)


def test_other_places_without_data(tmp_path: Path) -> None:
    cases = [
        (tmp_path, "test", "has no testmini.json"),
        (tmp_path / "none", "test", "no such data file or directory"),
        (tmp_path, "calibration", "for the split test only"),
        ("procedural", "train", "splits test and calibration"),
    ]
    for data, split, complaint in cases:
        with pytest.raises(UserError, match=complaint):
            MathVista().load(data, split=split)
    (tmp_path / "testmini.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*testmini\.json"):
        MathVista().load(tmp_path)


def test_rows_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images arrive encoded, so that a thousand of them fit into memory."""
    import datasets

    noise = np.zeros((5, 6, 3), dtype=np.uint8)
    features = datasets.Features(
        {
            **{k: datasets.Value("string") for k in ("pid", "question", "image", "answer")},
            "answer_type": datasets.Value("string"),
            "precision": datasets.Value("float64"),
            "decoded_image": datasets.Image(),
        }
    )
    known = {k: v for k, v in ROW.items() if k in features}
    row = {**known, "decoded_image": Image.fromarray(noise)}
    table = datasets.Dataset.from_list([row], features=features)
    asked = {}

    def load_dataset(*args: Any, **named: Any) -> datasets.Dataset:
        asked.update(named, repo=args[0])
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = MathVista().load("hub")
    (sample,) = data.samples
    assert isinstance(sample, VisualSample) and data.source == "hub"
    assert np.array_equal(sample.media.frames()[0], noise)
    assert asked == {"repo": HUB.repo, "split": "testmini", "revision": HUB.revision}


# Agents


def test_messages_and_observations() -> None:
    nodes = WORK.workflow.nodes
    assert WORK.agents == (
        "Math Solver",
        "Mathematical Analyst",
        "Programming Expert",
        "FinalRefer",
    )
    last = WORK.message(nodes[3], WORK.workflow.consumes(nodes[3]))
    slots = [piece.name for piece in last.user if isinstance(piece, Slot)]
    assert slots[0] == "q" and {"out0", "out1", "out2", "obs2"} <= set(slots)
    words = "".join(piece.text for piece in last.user if isinstance(piece, Text))
    assert "The program printed:" in words and words.startswith("Problem:")
    sample = samples_of(WORK)[0]
    code = "```python\nprint(3 + 4)\n```"
    assert WORK.observe(nodes[2], code, sample) == "7"
    assert WORK.observe(nodes[0], code, sample) is None
    assert WORK.observe(nodes[2], "no program", sample) is None


def test_scores_name_their_scorer() -> None:
    sample = samples_of(WORK)[0]
    assert WORK.score(sample, "").notes == {"scorer": "mathvista-1"}
    with pytest.raises(TypeError, match="asks about no picture"):
        WORK.score(Sample("x", "q", "a"), "")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [({"problems": 0}, "start at 1"), ({"topology": "ring"}, "unknown topology 'ring'")],
)
def test_bad_settings(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        MathVista(**settings)
