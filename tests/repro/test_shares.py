"""Work in several processes: what is told, what fails, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from kvcmas.errors import UserError
from repro.runners.shares import Tell
from results.records import read_runs

# Starting processes leaves the one that does a helper of multiprocessing that never ends before it
# does, so all of this runs in processes of its own.
HEARD = """
import signal
from repro.runners.shares import run_shares
from tests.repro.test_shares import {work}
heard = []
if __name__ == "__main__":
    # Jobs in the background of a shell begin with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = run_shares({work}, {shares}, lambda *message: heard.append(message))
    print(failed, sorted(heard))
"""


def tells(first: int, count: int, tell: Tell) -> None:
    for n in range(first, first + count):
        tell(n)


def refuses_two(number: int, tell: Tell) -> None:
    tell(number)
    if number == 2:
        raise UserError("not two")


def waits(directory: str, tell: Tell) -> None:
    (Path(directory) / str(os.getpid())).touch()
    time.sleep(120)


def python(code: str, directory: Path) -> subprocess.Popen[str]:
    directory.mkdir(exist_ok=True)
    script = directory / "script.py"
    script.write_text(code)
    # A cache of its own, since what a calibration found is found again.
    changed = {"PYTHONPATH": os.getcwd(), "REPRO_CACHE": str(directory / "cache")}
    environment = {**os.environ, **changed}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, script], stdout=pipe, stderr=pipe, text=True, env=environment
    )


@pytest.mark.parametrize(
    ("work", "shares", "expected"),
    [
        ("tells", [(3, 2), (7, 1)], "[] [(0, 3), (0, 4), (1, 7)]"),
        ("refuses_two", [(1,), (2,), (3,)], "[1] [(0, 1), (1, 2), (2, 3)]"),
    ],
)
def test_messages_are_heard_and_failures_known(
    work: str, shares: list[tuple[int, ...]], expected: str, tmp_path: Path
) -> None:
    done = python(HEARD.format(work=work, shares=shares), tmp_path)
    out, err = done.communicate(timeout=120)
    assert (out.strip(), err) == (expected, "")


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_its_parent(ended: signal.Signals, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    parent = python(HEARD.format(work="waits", shares=[(str(pids),)] * 2), tmp_path)
    assert wait_for(lambda: len(list(pids.iterdir())) == 2)
    parent.send_signal(ended)
    parent.communicate(timeout=60)
    assert wait_for(lambda: not any(alive(path.name) for path in pids.iterdir()))


def test_fidelity_leaves_the_same_records_in_one_process_and_in_two(tmp_path: Path) -> None:
    tables = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        code = f"""
import sys, torch
torch.set_num_threads(2)
from repro.cli import main
if __name__ == "__main__":
    sys.argv = ["repro", "fidelity", "--model=tiny-llama", "--warm=2", "--calibration=1", "--n=2",
        "--set=max_new_tokens=4", "--set=jobs={jobs}", "--set=timing=null", "--cell=nonshared",
        "--cell=fullshared", "--cell=kvcmas rho=0.8", "--out={out}"]
    main()
"""
        done = python(code, out)
        _, err = done.communicate(timeout=300)
        assert done.returncode == 0, err
        assert ("3 cells in 2 processes" in err) == (jobs == 2)
        assert "calibrating kvcmas" in err and "going on in one" not in err, err
        settings = [run.info.environment["torch"] for run in read_runs(out / "fidelity")]
        threads = {parts["threads"] for parts in settings}
        assert threads == {2 // jobs}
        table = pd.read_csv(out / "tables" / "tablefidelity.csv", comment="#")
        tables.append(table[["method", "variant", "rho_entry", "kl_first_nats", "row_layers"]])
    pd.testing.assert_frame_equal(*tables, rtol=1e-4, atol=1e-6)


def test_a_cell_that_fails_in_its_process_is_named_by_the_command(tmp_path: Path) -> None:
    code = f"""
import sys, torch
torch.set_num_threads(2)
from repro.cli import main
if __name__ == "__main__":
    sys.argv = ["repro", "fidelity", "--model=tiny-llama", "--warm=2", "--calibration=1", "--n=1",
        "--set=max_new_tokens=4", "--set=jobs=2", "--cell=nonshared",
        "--cell=relaycaching rho=0.99", "--out={tmp_path / "out"}"]
    main()
"""
    done = python(code, tmp_path)
    _, err = done.communicate(timeout=300)
    assert done.returncode == 2
    assert "error: " in err and "Traceback" not in err


def alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
