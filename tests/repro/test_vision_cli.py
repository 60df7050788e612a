"""Pictures on the command line: what a run records, and one line for whatever is wrong."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from repro import cli
from results.records import read_run
from tests.workloads.films import ramp, write_clip

PICTURE = {"pid": "1", "question": "How many?", "answer": "2", "answer_type": "integer"}
CLIP = {
    "question_id": "1-1",
    "question": "Which?",
    "options": ["A. a", "B. b", "C. c", "D. d"],
    "answer": "A",
}


@pytest.fixture
def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Exit code and standard error of a command in this process."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["repro", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0), " ".join(capsys.readouterr().err.split())

    return run


def pictures(folder: Path, names: tuple[str, ...] = ("1.png",)) -> Path:
    rows = {str(i): {**PICTURE, "pid": str(i), "image": name} for i, name in enumerate(names)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "testmini.json").write_text(json.dumps(rows))
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "1.png")
    return folder


def clips(folder: Path, video: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "videomme.jsonl").write_text(json.dumps({**CLIP, "videoID": video}) + "\n")
    return folder


def accuracy(bench: str, data: Path | str, out: Path, *more: str) -> tuple[str, ...]:
    return (
        "accuracy",
        f"--bench={bench}",
        f"--data={data}",
        f"--out={out}",
        "--n=1",
        "--methods=fullshared",
        "--set=max_new_tokens=2",
        *more,
    )


@pytest.mark.usefixtures("tiny_llava")
def test_a_run_says_what_it_saw(ended: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    data = pictures(tmp_path / "data", ("1.png", "gone.png"))
    code, told = ended(*accuracy("mathvista", data, tmp_path / "out"))
    assert code == 0, told
    assert "1 samples of testmini.json are left out" in told
    assert "mathvista-1 (gone.png)" in told
    (directory,) = (path.parent for path in (tmp_path / "out").rglob("run.json"))
    run = read_run(directory)
    assert run.info.image_processor == "LlavaOnevisionImageProcessorPil"
    assert run.info.missing == ("mathvista-1 (gone.png)",)
    packages: Any = run.info.environment["packages"]
    assert packages["av"] and packages["pillow"]
    first, *others = run.turns
    assert first.times_s["look"] > 0 and not any("look" in turn.times_s for turn in others)
    assert first.e2e_s == pytest.approx(sum(first.times_s.values()))
    assert first.ttft_s == pytest.approx(first.times_s["plan"] + first.times_s["prefill"])
    assert run.samples[0].notes["scorer"] == "mathvista-1"
    query = next(edge for edge in first.edges if edge.slot == "q")
    assert query.tokens > 36 + len(PICTURE["question"])  # rows of the picture, then bytes


def damaged(tmp_path: Path) -> list[tuple[tuple[str, ...], str]]:
    """Commands that must fail, each with a part of its line."""
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    broken = pictures(tmp_path / "broken")
    (broken / "1.png").write_bytes((broken / "1.png").read_bytes()[:60])
    text = clips(tmp_path / "text", "a")
    (text / "a.mp4").write_text("not a video")
    absent = clips(tmp_path / "absent", "b")
    return [
        (accuracy("mathvista", tmp_path / "empty", out), "has no testmini.json"),
        (accuracy("videomme", tmp_path / "empty", out), "has no videomme.jsonl or"),
        (accuracy("mathvista", broken, out), "cannot read image 1.png: "),
        (accuracy("videomme", text, out), "cannot read video a.mp4: Invalid data"),
        (accuracy("videomme", absent, out), "not one of its 1 questions has its video"),
        (accuracy("videomme", "hub", out), "give --data DIR with questions and clips"),
        (
            accuracy("mathvista", pictures(tmp_path / "fine"), out, "--model=tiny-llama"),
            "tiny-llama takes no images; give a LLaVA-OneVision",
        ),
    ]


@pytest.mark.usefixtures("tiny_llama", "tiny_llava")
def test_what_is_wrong_gets_one_clear_line(
    ended: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    for command, complaint in damaged(tmp_path):
        code, told = ended(*command)
        assert code == 2 and complaint in told and "Traceback" not in told, told


@pytest.mark.usefixtures("tiny_llava")
def test_a_clip_from_a_folder_runs(ended: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    data = clips(tmp_path / "data", "c")
    write_clip(data / "c.mp4", ramp(40))
    code, told = ended(*accuracy("videomme", data, tmp_path / "out"))
    assert code == 0, told
    (directory,) = (path.parent for path in (tmp_path / "out").rglob("run.json"))
    query = next(edge for edge in read_run(directory).turns[0].edges if edge.slot == "q")
    assert query.tokens > 32 * 4 + 1
    shutil.rmtree(tmp_path / "out")
