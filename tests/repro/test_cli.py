"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from repro import cli
from results.records import normalised, read_run, read_runs

pytestmark = pytest.mark.usefixtures("tiny_llama")


def repro(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from repro.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """The same entry point without a process of its own: importing torch takes seconds."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["repro", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return run


def accuracy(out: Path, *more: str) -> tuple[str, ...]:
    return (
        "accuracy",
        "--bench=gsm8k",
        "--model=tiny-llama",
        "--n=3",
        "--set=max_new_tokens=6",
        f"--out={out}",
        *more,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A whole run of three methods, and what it printed."""
    out = tmp_path_factory.mktemp("runs")
    done = repro(*accuracy(out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_accuracy_prints_the_table_and_keeps_records(finished: tuple[Path, str]) -> None:
    out, printed = finished
    for name in ("NonShared", "FullShared", "KVCMAS", "data=procedural", "rho"):
        assert name in printed
    runs = read_runs(out)
    assert {run.info.method for run in runs} == {"nonshared", "fullshared", "kvcmas"}
    for run in runs:
        assert len(run.samples) == 3
        assert len(run.turns) == 12
        assert run.info.environment["packages"]["torch"]
    for suffix in ("csv", "parquet", "md", "tex"):
        assert (out / f"table1.{suffix}").stat().st_size > 0


def test_all_methods_see_the_same_ids_where_trajectories_coincide(
    finished: tuple[Path, str],
) -> None:
    first_turns = [
        [turn.prompt_sha256 for turn in run.turns if turn.turn_index == 0]
        for run in read_runs(finished[0])
    ]
    assert first_turns[0] == first_turns[1] == first_turns[2]


def test_first_token_comparison_with_nonshared(finished: tuple[Path, str]) -> None:
    runs = {run.info.method: run for run in read_runs(finished[0])}
    assert all(turn.first_token.kl is None for turn in runs["nonshared"].turns)
    for method in ("fullshared", "kvcmas"):
        first = [turn for turn in runs[method].turns if turn.turn_index == 0]
        assert all(turn.first_token.kl is not None for turn in first)
        assert all(turn.first_token.kl < 1e-6 for turn in first), "the first turn is dense"
    assert any((turn.first_token.kl or 0) > 1e-6 for turn in runs["fullshared"].turns)


def test_running_again_computes_nothing(finished: tuple[Path, str]) -> None:
    out, printed = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("records.jsonl")}
    again = repro(*accuracy(out))
    assert again.returncode == 0
    assert again.stdout == printed
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("records.jsonl")}


def test_a_killed_run_resumes_to_the_same_records(
    finished: tuple[Path, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", "from repro.cli import main; main()", *accuracy(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            files = list(tmp_path.rglob("kvcmas-*/records.jsonl"))
            if files and files[0].stat().st_size > 0:
                break
            assert process.poll() is None, "finished before it could be killed"
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    interrupted = read_runs(tmp_path)
    assert any(len(run.samples) < 3 for run in interrupted), "killed too late to test anything"
    assert repro(*accuracy(tmp_path)).returncode == 0
    whole = {run.info.run_key: run for run in read_runs(finished[0])}
    resumed = {run.info.run_key: run for run in read_runs(tmp_path)}
    assert whole.keys() == resumed.keys()
    for key, run in whole.items():
        assert normalised(run.turns) == normalised(resumed[key].turns)
        assert normalised(run.samples) == normalised(resumed[key].samples)


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from repro.cli import main; main()",
        *accuracy(tmp_path, "--n=500"),
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell inherits an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not any(
            file.stat().st_size for file in tmp_path.rglob("records.jsonl")
        ):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "give the same command again" in notes
    assert "Traceback" not in notes
    assert all(run.samples for run in read_runs(tmp_path))


def test_dry_run_prints_cells_and_runs_nothing(
    tmp_path: Path, run_here: Callable[..., Ended]
) -> None:
    done = run_here(*accuracy(tmp_path, "--dry-run", "--set=kvcmas.tau=0.7", "--time-limit=7"))
    assert done.code == 0
    assert "tau=0.7" in done.out and "no sample begins after 7 min" in done.out
    assert not list(tmp_path.rglob("run.json"))


def test_table_from_records_only(
    finished: tuple[Path, str], tmp_path: Path, run_here: Callable[..., Ended]
) -> None:
    out, _ = finished
    assert run_here("table", "1", f"--runs={out}", f"--out={tmp_path}").code == 0
    assert (tmp_path / "table1.csv").read_bytes() == (out / "table1.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--bench=gsm8q",), ("gsm8q", "gsm8k")),
        (("--methods=kvcmass",), ("kvcmass", "kvcmas")),
        (("--model=smollm-135m",), ("smollm2-135m",)),
        (("--model=.",), ("config.json",)),
        (("--profile=smokey",), ("smoke",)),
        (("--data=nowhere",), ("nowhere",)),
        (("--set=rank_base=0",), ("rank_base", "at least 1")),
        (("--set=capacity=0",), ("capacity", "at least 1")),
        (("--set=tau",), ("key=value",)),
        (("--set=taw=1",), ("taw", "tau")),
        (("--set=seed=often",), ("seed",)),
        (("--set=max_new_tokens=5000",), ("5000", "positions")),
        (("--out=/proc/nothing",), ("/proc/nothing",)),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(
    tmp_path: Path,
    run_here: Callable[..., Ended],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    done = run_here(*accuracy(tmp_path, *arguments))
    assert done.code == 2, done.err
    errors = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]


def test_a_malformed_data_file_is_named_with_its_line(
    tmp_path: Path, run_here: Callable[..., Ended]
) -> None:
    (tmp_path / "test.jsonl").write_text(
        '{"question": "1+1?", "answer": "#### 2"}\n{"question": 3}\n'
    )
    done = run_here(*accuracy(tmp_path / "out", f"--data={tmp_path}"))
    assert done.code == 2
    assert "test.jsonl:2" in done.err


def test_env_prints_json(run_here: Callable[..., Ended]) -> None:
    record = json.loads(run_here("env").out)
    assert record["packages"]["torch"]


def test_methods_and_claims_are_listed(run_here: Callable[..., Ended]) -> None:
    listed = run_here("methods").out
    assert "kvcmas" in listed
    assert "tau" in listed
    ledger = run_here("claims").out
    assert "C01" in ledger
    assert "C37" in ledger


def test_fidelity_end_to_end(tmp_path: Path, run_here: Callable[..., Ended]) -> None:
    done = run_here(
        "fidelity",
        "--model=tiny-llama",
        "--warm=3",
        "--calibration=2",
        "--n=2",
        "--set=max_new_tokens=6",
        "--cell=nonshared",
        "--cell=fullshared",
        "--cell=kvcmas accept_all=true",
        "--cell=kvcmas rho=0.8",
        "--cell=cacheblend ratio=1.0",
        f"--out={tmp_path}",
    )
    assert done.code == 0, done.err
    runs = {(run.info.method, run.info.label): run for run in read_runs(tmp_path / "fidelity")}
    evaluated = {key: [row for row in run.fidelity if not row.warm] for key, run in runs.items()}
    assert {len(rows) for rows in evaluated.values()} == {8}
    prompts = {tuple(row.prompt_sha256 for row in rows) for rows in evaluated.values()}
    assert len(prompts) == 1, "every method replays the same ids"
    assert max(kl for row in evaluated[("nonshared", "")] for kl in row.answer_kl) < 1e-9
    assert max(kl for row in evaluated[("cacheblend", "ratio=1.0")] for kl in row.answer_kl) < 1e-6
    assert max(kl for row in evaluated[("fullshared", "")] for kl in row.answer_kl) > 1e-4
    for row in evaluated[("kvcmas", "accept all")]:
        assert all(e.first or e.action == "correct" for e in row.edges if e.tokens)
    timed = pd.read_csv(tmp_path / "tables" / "tablettft.csv", comment="#", keep_default_na=False)
    assert timed["variant"].tolist() == ["", "", "ratio=1.0", "accept all", "rho=0.8"]
    assert timed["row_layers_ratio"].tolist()[0] == 1
    # Everything is accepted, whatever the calibrated threshold says.
    assert len(set(timed["row_layers"].tolist()[3:])) == 1


def test_run_records_do_not_depend_on_where_they_are_made(finished: tuple[Path, str]) -> None:
    directory = next(iter(finished[0].rglob("run.json"))).parent
    info = read_run(directory).info
    assert os.sep + "tmp" not in json.dumps(info.environment)
