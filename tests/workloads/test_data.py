import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from kvcmas.errors import UserError
from workloads import get
from workloads.base import Dataset

GOOD = {"question": "One and one?", "answer": "1 + 1 = 2\n#### 2"}


def load(data: str | Path, split: str = "test") -> Dataset:
    return get("gsm8k").load(data, split=split, seed=0)


def write(folder: Path, *lines: str, name: str = "test.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_a_directory_and_a_file_give_the_same_samples(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps(GOOD), "", json.dumps(GOOD | {"question": "\u00bfDos? "}))
    dataset = load(tmp_path)
    assert [(s.id, s.question, s.answer) for s in dataset.samples] == [
        ("gsm8k-test-0000", "One and one?", "2"),
        ("gsm8k-test-0001", "\u00bfDos?", "2"),
    ]
    assert dataset.source == "local"
    assert load(path) == dataset


def test_gzip_is_read(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(load(path).samples) == 1


def test_the_hash_covers_questions_and_answers(tmp_path: Path) -> None:
    texts = [GOOD, GOOD | {"question": "Else?"}, GOOD | {"answer": "#### 3"}]
    hashes = {load(write(tmp_path, json.dumps(text))).sha256 for text in texts}
    assert len(hashes) == 3
    assert load(write(tmp_path, json.dumps(GOOD))).sha256 in hashes


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ('["question"]', "an object with question, answer is expected, not list"),
        ('{"question": "a"}', "the field 'answer' is missing"),
        ('{"question": "a", "answer": 3}', "the field 'answer' must be a text"),
        ('{"question": "  ", "answer": "#### 1"}', "the field 'question' must be a text"),
        ('{"question": "a", "answer": "seven"}', "no '#### number'"),
    ],
)
def test_a_bad_line_is_named_with_its_place(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(UserError) as raised:
        load(tmp_path)
    assert str(raised.value).startswith(f"{path}:2: ")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(UserError, match=r"test\.jsonl:\d: not UTF-8"):
        load(tmp_path)


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() * 50)[:40])
    with pytest.raises(UserError, match=r"test\.jsonl\.gz"):
        load(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such data file or directory: .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"has no test\.jsonl"):
        load(tmp_path)
    write(tmp_path)
    with pytest.raises(UserError, match=r"test\.jsonl has no lines"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"has no train\.jsonl"):
        load(tmp_path, split="calibration")
    with pytest.raises(UserError, match="not 'dev'"):
        load(tmp_path, split="dev")


def test_the_hub_is_asked_for_a_pinned_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fake(*names: str, **options: str) -> list[dict[str, str]]:
        asked.update(names=names, **options)
        return [GOOD]

    monkeypatch.setattr(datasets, "load_dataset", fake)
    dataset = load("hub", split="calibration")
    assert asked["names"] == ("openai/gsm8k", "main")
    assert asked["split"] == "train" and len(asked["revision"]) == 40
    assert (dataset.source, dataset.samples[0].id) == ("hub", "gsm8k-calibration-0000")
    assert asked["revision"].startswith(dataset.label.partition("@")[2])


def test_an_unreachable_hub_offers_the_other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: str, **__: str) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"no route to host.*--data DIR.*--data procedural"):
        load("hub")


def test_gsm8k_itself_loads(shared: Path) -> None:
    dataset = load(shared / "data/gsm8k")
    assert len(dataset.samples) == 1319
    assert dataset.samples[0].answer == "18"
    assert len({s.id for s in dataset.samples}) == 1319
