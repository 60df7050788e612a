import getpass
import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest
import torch

from repro import env


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_record_is_plain_json() -> None:
    record = env.environment()
    assert json.loads(json.dumps(record)) == record


def test_record_states_what_runs_here() -> None:
    record = env.environment()
    assert record["python"] == platform.python_version()
    assert record["packages"]["torch"] == torch.__version__
    assert record["memory_bytes"] > 2**28
    assert 1 <= record["cpu"]["usable_cores"] <= record["cpu"]["logical_cores"]
    assert len(record["gpus"]) == torch.cuda.device_count()
    assert record["hardware"] == env.hardware()


def test_record_follows_the_thread_count() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert env.environment()["torch"]["threads"] == before + 1
    finally:
        torch.set_num_threads(before)


def test_record_lists_the_attention_kernels_in_use() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert env.environment()["torch"]["sdpa_kernels"] == ["math"]


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_not_for_records")
    monkeypatch.setenv("MKL_DIR", "/opt/not-for-records")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    record = env.environment()
    assert record["variables"]["OMP_NUM_THREADS"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in record["variables"]
    assert "not-for-records" not in json.dumps(record).replace("_", "-")


def test_record_names_no_person_machine_or_path() -> None:
    record = env.environment()
    words = set(re.split(r"[^\w.-]+", json.dumps(record)))
    assert platform.node() not in words
    assert getpass.getuser() not in words
    assert str(Path.home()) not in json.dumps(record)
    assert os.getcwd() not in json.dumps(record)


def test_absent_package_has_no_version() -> None:
    assert env._version("a-package-nobody-installed") is None


def test_commit_and_dirty_flag(tmp_path: Path) -> None:
    file = tmp_path / "package" / "module.py"
    file.parent.mkdir()
    file.write_text("x = 1\n")
    git(tmp_path, "init", "--quiet")
    assert env._git(file) is None, "nothing is committed yet"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert env._git(file) == {"commit": commit, "dirty": False}
    file.write_text("x = 2\n")
    assert env._git(file) == {"commit": commit, "dirty": True}


def test_installed_copy_inside_another_checkout_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "theirs")
    ours = tmp_path / "site-packages" / "module.py"
    ours.parent.mkdir()
    ours.write_text("")
    assert env._git(ours) is None


def test_outside_a_checkout_has_no_commit(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("")
    assert env._git(file) is None


def test_label_counts_gpus_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"name": "Big", "memory_bytes": 80 * 2**30, "capability": "9.0"}
    small = {"name": "Small", "memory_bytes": 24 * 2**30, "capability": "8.6"}
    monkeypatch.setattr(env, "_gpus", lambda: [big, small, big])
    assert env.hardware() == "2x Big 80 GiB, 1x Small 24 GiB"


def test_label_falls_back_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_gpus", list)
    assert re.fullmatch(r".+, \d+ cores, \d+ GiB", env.hardware())
