"""Solutions that attack the machine: a failed sample with a reason each, and the run goes on."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest

from workloads import sandbox
from workloads.base import Sample
from workloads.humaneval import HumanEval
from workloads.sandbox import Limits, run_python

SAMPLE = Sample(
    "hostile",
    'def area(a, b):\n    """ The area. """\n',
    "def check(candidate):\n    assert candidate(2, 3) == 6\n\ncheck(area)",
    {"entry_point": "area"},
)
LIMITS = Limits(wall_s=4, cpu_s=2)
GOOD = "```python\ndef area(a, b):\n    return a * b\n```"
SPENT = {"it took too long", "it used too much time or memory"}

# What is done before the right answer is given, and the reasons with which it may fail.
HOSTILE: dict[str, tuple[str, set[str]]] = {
    "an infinite loop": ("while True: pass", SPENT),
    "a fork bomb": ("import os\nwhile True: os.fork()", {*SPENT, "BlockingIOError"}),
    "a 10 GB allocation": ("x = bytearray(10 ** 10)", {"MemoryError"}),
    "a 10 GB file": (
        "f = open('f', 'wb', buffering=0)\nf.seek(10 ** 10)\nf.write(b'x')",
        {"OSError", *SPENT},
    ),
    "reading the home directory": ("import os\nos.listdir({home!r})", {"PermissionError"}),
    "opening a socket": (
        "import socket\nsocket.create_connection(('127.0.0.1', 9), 2)",
        {"OSError", "PermissionError", "ConnectionRefusedError"},
    ),
    "killing the parent": (
        "import os, signal\nos.kill({parent}, signal.SIGKILL)",
        {"ProcessLookupError", "PermissionError"},
    ),
    "printing 1 GB": ("for _ in range(1000): print('x' * 10 ** 6)", {"it printed too much"}),
    "deleting the working directory": (
        "import os, shutil\nshutil.rmtree(os.getcwd())\nos.rmdir(os.getcwd())",
        {"OSError", "PermissionError", "FileNotFoundError"},
    ),
    "deleting what lies beside it": (
        "import shutil\nshutil.rmtree({other!r})",
        {"PermissionError"},
    ),
    "writing to the home directory": ("open({home!r} + '/x', 'w')", {"PermissionError"}),
}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder that everybody may write to."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "kept").write_text("kept")
    for path in (tmp_path, folder, folder / "kept"):
        path.chmod(0o777)
    return folder


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_solution_fails_and_the_run_goes_on(
    name: str, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolation = run_python("pass").isolation
    if not (isolation.network and isolation.files):
        pytest.skip("the system allows no namespaces or has no Landlock")
    program, reasons = HOSTILE[name]
    program = program.format(home=str(Path.home()), parent=os.getpid(), other=str(other))
    body = "".join(f"    {line}\n" for line in program.splitlines())
    home = sorted(os.listdir(Path.home()))
    with tempfile.TemporaryDirectory() as folders:
        os.chmod(folders, 0o755)
        monkeypatch.setattr(sandbox.tempfile, "tempdir", folders)
        workload = HumanEval(limits=LIMITS)
        score = workload.score(SAMPLE, f"```python\ndef area(a, b):\n{body}    return a * b\n```")
        assert workload.score(SAMPLE, GOOD).correct
        assert os.listdir(folders) == []

    assert not score.correct
    assert score.extracted in reasons
    assert (other / "kept").read_text() == "kept" and os.listdir(other) == ["kept"]
    assert sorted(os.listdir(Path.home())) == home
    assert not psutil.Process().children(recursive=True)
