"""Accuracy cells with a budget: found on requests set apart, pools warm, everything resumable."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from kvcmas.errors import UserError
from repro.commands.accuracy_run import Request, run
from repro.runners import accuracy as accuracy_module
from repro.runners.accuracy import BLOCKS, block_ends
from results.gates import THRESHOLDS
from results.records import Run, normalised, read_runs

pytestmark = pytest.mark.usefixtures("tiny_llama")

Accuracy = Callable[..., list[Run]]


@pytest.fixture
def accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Accuracy:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))

    def made(**changes: object) -> list[Run]:
        values: dict[str, object] = {
            "bench": "gsm8k",
            "model": "tiny-llama",
            "n": 2,
            "warm": 2,
            "calibration": 2,
            "cells": ("nonshared", "kvcmas rho=0.5"),
            "set": ("max_new_tokens=5",),
            "out": tmp_path / "runs",
        }
        run(Request(**{**values, **changes}))  # type: ignore[arg-type]
        return read_runs(tmp_path / "runs")

    return made


def test_a_budget_is_found_apart_and_kept_in_the_records(
    accuracy: Accuracy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {run.info.method: run for run in accuracy()}
    kvcmas = runs["kvcmas"].info
    assert (kvcmas.label, kvcmas.target_rho, kvcmas.pool_state) == ("rho=0.5", 0.5, "warm")
    assert kvcmas.settings["tau"] != 0.3
    assert kvcmas.agents[-1] == "FinalRefer"
    assert runs["nonshared"].info.target_rho is None
    # Two requests per slot have filled the pool before the first evaluated one.
    assert runs["kvcmas"].turns[0].pool_entries > 0
    assert "tau=" in capsys.readouterr().err
    (trace,) = (tmp_path / "runs").glob("reserved-*.jsonl")
    before = trace.stat().st_mtime_ns
    again = {run.info.method: run for run in accuracy()}
    assert trace.stat().st_mtime_ns == before
    assert normalised(again["kvcmas"].turns) == normalised(runs["kvcmas"].turns)


def test_a_warm_run_resumes_with_its_pool(accuracy: Accuracy) -> None:
    options = {"cells": ("kvcmas",), "calibration": 0}
    (whole,) = accuracy(**options)
    assert whole.directory is not None
    rows = whole.directory / "records.jsonl"
    complete = rows.read_bytes()
    # As if it had been killed before its first sample: the pool was saved, the rows are gone.
    rows.write_bytes(b"")
    for file in (whole.directory / "state").iterdir():
        file.unlink()
    (resumed,) = accuracy(**options)
    assert normalised(resumed.turns) == normalised(whole.turns)
    assert len(rows.read_bytes()) > 0.9 * len(complete)


def test_cells_take_turns_and_lose_nothing_by_it(
    accuracy: Accuracy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"cells": ("nonshared", "kvcmas"), "calibration": 0, "n": 3}
    turns = {run.info.method: run.turns for run in accuracy(**options)}
    told = re.findall(r"^(nonshared|kvcmas):", capsys.readouterr().err, re.MULTILINE)
    assert [name for name, _ in groupby(told)] == ["nonshared", "kvcmas"] * 3
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setattr(accuracy_module, "BLOCKS", 1)
    whole = {run.info.method: run.turns for run in accuracy(**options)}
    assert {method: normalised(of) for method, of in turns.items()} == {
        method: normalised(of) for method, of in whole.items()
    }


# A process of its own, so that what spawning leaves behind ends with it.
SEARCH = """
import sys, torch
from repro.cli import main
from repro.runners.calibrate import Calibrator

def here(*_):
    sys.exit("a threshold was searched by the process that runs the samples")

if __name__ == "__main__":
    torch.set_num_threads(2)
    Calibrator._replay = here
    main()
"""


def test_thresholds_are_searched_in_processes_of_their_own(
    accuracy: Accuracy, tmp_path: Path
) -> None:
    cells = ("kvcomm rho=0.5", "kvcmas rho=0.5")
    settings = {run.info.method: run.info.settings for run in accuracy(cells=cells)}
    shutil.rmtree(tmp_path / "cache" / "calibration")
    shutil.rmtree(tmp_path / "runs")
    script = tmp_path / "search.py"
    script.write_text(SEARCH)
    words = ["--bench=gsm8k", "--model=tiny-llama", "--n=2", "--warm=2", "--calibration=2"]
    words += [f"--cell={cell}" for cell in cells]
    words += ["--set=max_new_tokens=5", "--set=jobs=2", f"--out={tmp_path / 'runs'}"]
    done = subprocess.run(
        [sys.executable, str(script), "accuracy", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "kvcomm: gamma=" in done.stderr and "kvcmas: tau=" in done.stderr
    for made in read_runs(tmp_path / "runs"):
        name = THRESHOLDS[made.info.method]
        expected = settings[made.info.method][name]
        assert made.info.settings[name] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("samples", [0, 1, 7, 8, 9, 20, 153])
def test_turns_cover_the_samples(samples: int) -> None:
    ends = block_ends(samples)
    assert len(ends) <= BLOCKS and ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == samples


def test_orders_are_runs_of_their_own_for_methods_that_learn(accuracy: Accuracy) -> None:
    runs = accuracy(orders=2, warm=0, calibration=0, cells=("nonshared", "kvcmas"), n=3)
    seeds = sorted((run.info.method, run.info.seed) for run in runs)
    assert seeds == [("kvcmas", 0), ("kvcmas", 1), ("nonshared", 0)]
    other = next(run for run in runs if run.info.seed == 1)
    # The first turn sees the same prompt in every order, so it is compared with NonShared's.
    compared = [turn.first_token.kl for turn in other.turns if turn.turn_index == 0]
    assert len(compared) == 3 and all(kl is not None and kl < 1e-6 for kl in compared)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"calibration": 0}, "rho= needs requests to calibrate on; give --calibration"),
        ({"cells": ("fullshared rho=0.5",)}, "fullshared has no budget"),
        ({"cells": ("kvcmas rho=0.5 tau=0.1",)}, "give one of them"),
        ({"methods": " , "}, "no method was named"),
        ({"study": "threshhold", "cells": ()}, "threshold"),
        ({"n": 999}, "leaves 1 samples"),
        ({"bench": "humaneval", "data": "procedural"}, "no procedural problems"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    accuracy: Accuracy, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        accuracy(**changes)
