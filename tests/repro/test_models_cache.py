"""Building into the cache: atomic, checked, one builder at a time, and no leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from repro.models import resolve
from repro.models.cache import build, find_problem, read_manifest

RECIPE = {"kind": "test", "content": "abc"}

# Appends one byte to the log given as its argument for every write it performs, then waits.
BUILDER = """
import sys, time
from pathlib import Path
from repro.models.cache import build

def write(output, work):
    (output / "weights").write_bytes(b"half")
    with open(sys.argv[1], "ab") as log:
        log.write(b"w")
    time.sleep(float(sys.argv[2]))
    (output / "weights").write_bytes(b"whole")

build("m", {"kind": "test", "content": "abc"}, write, needed_bytes=0)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write_whole(output: Path, work: Path) -> None:
    (work / "scratch").write_bytes(b"gone afterwards")
    (output / "weights").write_bytes(b"whole")
    (output / "config").write_bytes(b"{}")


def make(*, verify: bool = False) -> Path:
    return build("m", RECIPE, write_whole, needed_bytes=0, verify=verify)


def visible(models: Path) -> list[str]:
    return sorted(path.name for path in models.iterdir() if path.suffix != ".lock")


def start_builder(log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", BUILDER, str(log), str(seconds)])


def wait_for(log: Path, process: subprocess.Popen[bytes]) -> None:
    while not log.exists() or not log.stat().st_size:
        assert process.poll() is None, "the builder died before it wrote anything"
        time.sleep(0.02)


def test_a_build_holds_the_files_and_a_manifest_of_them(models: Path) -> None:
    path = make()
    assert visible(models) == ["m"]
    assert sorted(item.name for item in path.iterdir()) == ["config", "manifest.json", "weights"]
    manifest = read_manifest(path)
    assert manifest is not None and manifest.recipe == RECIPE
    assert manifest.files["weights"].size == len(b"whole")
    assert set(manifest.files) == {"config", "weights"}
    assert {"transformers", "torch"} <= set(manifest.versions)


def test_an_intact_build_is_not_repeated(models: Path) -> None:
    stamp = (make() / "weights").stat().st_mtime_ns
    assert (make(verify=True) / "weights").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: (path / "weights").unlink(), "weights is missing"),
        (lambda path: (path / "weights").write_bytes(b"who"), "weights has the wrong size"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing or malformed"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is missing or"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is missing or"),
    ],
)
def test_damage_is_seen_and_repaired(models: Path, damage: object, problem: str) -> None:
    path = make()
    damage(path)  # type: ignore[operator]
    assert (find_problem(path, RECIPE, verify=False) or "").startswith(problem)
    make()
    assert find_problem(path, RECIPE, verify=True) is None
    assert visible(models) == ["m"]


def test_changed_bytes_of_the_same_size_are_seen_on_verification(models: Path) -> None:
    path = make()
    (path / "weights").write_bytes(b"WHOLE")
    make()
    assert (path / "weights").read_bytes() == b"WHOLE"
    make(verify=True)
    assert (path / "weights").read_bytes() == b"whole"


def test_another_recipe_is_another_build(models: Path) -> None:
    make()
    other = {"kind": "test", "content": "xyz"}
    build("m", other, lambda out, work: (out / "new").touch(), needed_bytes=0)
    assert [item.name for item in sorted((models / "m").iterdir())] == ["manifest.json", "new"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("no"), OSError("disk")])
def test_a_failed_build_leaves_nothing_and_keeps_the_old_one(
    models: Path, error: BaseException | type[BaseException]
) -> None:
    def fail(output: Path, work: Path) -> None:
        (output / "weights").write_bytes(b"half")
        raise error

    with pytest.raises((KeyboardInterrupt, UserError)):
        build("m", RECIPE, fail, needed_bytes=0)
    assert visible(models) == []
    make()
    with pytest.raises((KeyboardInterrupt, UserError)):
        build("m", {"kind": "other"}, fail, needed_bytes=0)
    assert (models / "m" / "weights").read_bytes() == b"whole"
    assert visible(models) == ["m"]


def test_a_killed_build_is_cleaned_up_and_repeated(models: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_builder(log, seconds=600)
    try:
        wait_for(log, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (leftover,) = visible(models)
    assert leftover.startswith(".m.tmp-")
    assert (make() / "weights").read_bytes() == b"whole"
    assert visible(models) == ["m"]


def test_two_processes_build_once(models: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = start_builder(log, seconds=1.0)
    try:
        wait_for(log, first)
        second = start_builder(log, seconds=1.0)
        assert (first.wait(), second.wait()) == (0, 0)
    finally:
        first.kill()
    assert log.read_bytes() == b"w"
    assert (models / "m" / "weights").read_bytes() == b"whole"


def test_too_little_space_is_said_before_anything_is_written(models: Path) -> None:
    with pytest.raises(UserError, match=r"cannot build model 'm' .* GB are needed"):
        build("m", RECIPE, write_whole, needed_bytes=10**17)
    assert visible(models) == []


def test_an_unusable_cache_directory_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("REPRO_CACHE", str(blocker))
    with pytest.raises(UserError, match="Not a directory; REPRO_CACHE") as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_damaged_tiny_model_is_rebuilt_to_the_same_revision(models: Path) -> None:
    before = resolve("tiny-llama")
    weights = before.path / "model.safetensors"
    with weights.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    assert resolve("tiny-llama", verify=True) == before
    assert weights.read_bytes()[-1:] == last
