"""`--time-limit`: a run ends after the piece of work in hand, and the next one goes on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from repro.commands.accuracy_run import Request, run
from repro.profiles import load_profile
from repro.runners import deadline as module
from repro.runners.deadline import Deadline, TimeIsUp
from results.records import normalised, read_runs

BENCHES = ("gsm8k", "humaneval", "mmlu")


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a minute further each time somebody looks."""
    ticks: Iterator[int] = count(0, 60)
    monkeypatch.setattr(module, "monotonic", lambda: next(ticks))


@pytest.mark.usefixtures("minutes")
def test_a_deadline_passes_once_its_minutes_are_over() -> None:
    deadline = Deadline(2)
    deadline.check(1, 9, "samples")
    with pytest.raises(TimeIsUp, match=r"time limit of 2 min: 2 of 9 samples"):
        deadline.check(2, 9, "samples")


@pytest.mark.usefixtures("minutes")
@pytest.mark.parametrize(("limit", "done"), [(None, 1), (0, 1), (1, 9)])
def test_no_limit_or_nothing_left_goes_on(limit: float | None, done: int) -> None:
    Deadline(limit).check(done, 9, "samples")


@pytest.mark.usefixtures("tiny_llama", "minutes")
def test_runs_of_a_minute_add_up_to_one_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))

    def said(limit: float) -> str:
        run(
            Request(
                bench="gsm8k",
                model="tiny-llama",
                n=2,
                warm=1,
                calibration=2,
                time_limit=limit,
                cells=("nonshared", "kvcmas rho=0.5"),
                set=("max_new_tokens=5",),
                out=tmp_path / "runs",
            )
        )
        return " ".join(capsys.readouterr().err.split())

    told: list[str] = []
    while not told or (len(told) < 9 and "time limit" in told[-1]):
        told.append(said(1))
    # The last request ends no run: the one that records it goes on to the first sample.
    at = [place for text in told for place in re.findall(r"time limit of 1 min: (.*?);", text)]
    assert at == [
        "1 of 3 requests that are set apart are recorded",
        "2 of 3 requests that are set apart are recorded",
        "1 of 4 samples of all cells are run",
        "2 of 4 samples of all cells are run",
        "3 of 4 samples of all cells are run",
    ]
    assert "the same command again" in told[0]
    assert all(len(made.samples) == 2 for made in read_runs(tmp_path / "runs"))
    pieces = [normalised(made.turns) for made in read_runs(tmp_path / "runs")]
    shutil.rmtree(tmp_path / "runs")
    assert "time limit" not in said(0)
    assert [normalised(made.turns) for made in read_runs(tmp_path / "runs")] == pieces


def test_the_cpu_profile_takes_two_hours_at_most() -> None:
    profile = load_profile("cpu").accuracy
    limits = [profile.at(bench).time_limit for bench in BENCHES]
    assert all(limits) and sum(limit or 0 for limit in limits) <= 120
