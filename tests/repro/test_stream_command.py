"""`repro stream` as a user meets it, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from kvcmas.engine.session import Session, TurnResult
from kvcmas.errors import UserError
from repro.cli import app
from repro.profiles import load_profile, profile_names
from repro.runners.stream import run as runner
from results import stats
from results.records import Run, normalised, read_runs
from results.stream import stream_cells
from results.tables import build_table

pytestmark = pytest.mark.usefixtures("tiny_llama")

SMALL = ("--model=tiny-llama", "--ctx=2k", "--scale=64", "--part=context", "--outputs=128")
# RelayCaching cannot reach a ratio of 0.9 with four layers.
METHODS = "nonshared,fullshared,droidspeak,cacheblend,graphflow,kvcomm,kvcmas"


def stream(out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["stream", f"--out={out}", *more])


def streamed(out: Path) -> dict[str, Run]:
    return {run.info.method: run for run in read_runs(out) if run.info.kind == "stream"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of all methods, made once."""
    folder = tmp_path_factory.mktemp("stream")
    ended = stream(folder, *SMALL, f"--methods={METHODS}")
    assert ended.exit_code == 0, ended.output
    for part in ("Table 11: Memory of a single stream", "Table 12:", "7 cells on 1 shapes"):
        assert part in ended.output
    return folder


def test_every_method_ran_the_same_prompts_at_its_ratio(out: Path) -> None:
    runs = streamed(out)
    assert sorted(runs) == sorted(METHODS.split(","))
    assert len({tuple(r.prompt_sha256 for r in run.streamed) for run in runs.values()}) == 1
    for name in ("kvcmas", "kvcomm", "graphflow"):
        assert stats.rho(runs[name].streamed, "entry") == pytest.approx(0.8)
    assert stats.rho(runs["fullshared"].streamed) == 1
    for name in ("droidspeak", "cacheblend"):
        assert stats.rho(runs[name].streamed) == pytest.approx(0.9, abs=0.1)
    for run in runs.values():
        info = run.info.stream
        assert info is not None and info.rates is not None
        assert (len(run.samples), len(run.streamed)) == (5, 15)
        assert info.warm_up_requests == 3
        first = run.streamed[0]
        assert {edge.action for edge in first.edges} <= {"dense", "correct"}
        assert first.edges[0].first
        assert all(row.output_tokens == 2 for row in run.streamed)


def test_measured_bytes_are_the_calculated_ones(out: Path) -> None:
    for name, run in streamed(out).items():
        info, rows = run.info.stream, run.streamed
        assert info is not None
        held = max(row.memory.held for row in rows)
        transient = rows[0].memory.transient
        assert (transient is None) == (name not in ("graphflow", "kvcomm", "kvcmas"))
        if name == "graphflow":  # calculated before its means are finished and their counts kept
            assert held <= info.memory_needed_bytes
        else:
            assert held == pytest.approx(info.memory_needed_bytes - _building(run), rel=0.02)
        if name in ("kvcomm", "kvcmas"):
            assert info.pool_copies == run.info.settings["capacity"]
            assert rows[0].memory.pool_base and rows[0].memory.pool_delta
            assert rows[0].pool_bytes == rows[0].memory.pool_base + rows[0].memory.pool_delta
        assert (rows[0].peak.resident or 0) > info.memory_needed_bytes


def _building(run: Run) -> int:
    """What the calculation adds for one anchor in the making."""
    from kvcmas.registry import make_method
    from repro.models.published import figures
    from repro.runners.memory_model import layout_graph, layout_turns, transient_bytes
    from traces.generator import GeneratorSettings

    lengths = GeneratorSettings(vocab=9, shared=2048, output=128, scale=64).lengths
    turns = layout_turns(lengths, layout_graph("T", 3, 1))
    method = make_method(run.info.method, _tuples(run.info.settings))
    return transient_bytes(method, turns, figures("tiny-llama").spec)


def _tuples(settings: dict[str, object]) -> dict[str, object]:
    return {
        key: tuple(tuple(v) if isinstance(v, list) else v for v in value)
        if isinstance(value, list)
        else value
        for key, value in settings.items()
    }


def test_work_explains_time_by_machine_rates(out: Path) -> None:
    cells = {cell.method: cell for cell in stream_cells(streamed(out).values())}
    row = cells["nonshared"].run.streamed[1]
    (model, fills) = row.work
    assert (model.flops, fills.flops) == (row.executed_flops, 0)
    correcting = next(r for r in cells["kvcmas"].run.streamed if r.edges[0].action == "correct")
    assert correcting.work[1].flops > 0 and correcting.work[1].moved_bytes > 0
    referring = cells["kvcomm"].run.streamed[0]
    assert [work.phase for work in referring.work] == ["model", "fills", "reference"]
    for cell in cells.values():
        computed, moved, slower = cell.shares()
        assert 0 < max(computed, moved) <= slower + 1e-9


def test_tables_come_from_records_alone(out: Path) -> None:
    table = build_table("12", read_runs(out))
    assert list(table.frame["method"])[:2] == ["NonShared", "FullShared"]
    dense = table.frame.iloc[0]
    assert (dense["speedup"], dense["work_bound"], dense["n"]) == (1, 1, 10)
    memory = build_table("11", read_runs(out)).frame.set_index("method")
    assert memory.loc["KVComm", "held_ratio"] > 1
    assert build_table("14", read_runs(out)).frame.empty


def test_finished_cells_are_kept_and_interrupted_ones_go_on(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (*SMALL, "--methods=kvcmas")
    again = stream(out, *few)
    assert again.exit_code == 0 and "1 cells, 0 to run" in again.output
    workflow = runner.Runner._workflow

    def interrupted(self: runner.Runner, cell: object, *more: object) -> None:
        if more[2] == 3:
            raise KeyboardInterrupt
        workflow(self, cell, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(runner.Runner, "_workflow", interrupted)
    stopped = stream(tmp_path, *few)
    assert stopped.exit_code == 130 and "interrupted after 0 of 1 cells" in stopped.output
    assert len(streamed(tmp_path)["kvcmas"].samples) == 3
    monkeypatch.undo()
    assert stream(tmp_path, *few).exit_code == 0
    whole, resumed = streamed(out)["kvcmas"], streamed(tmp_path)["kvcmas"]
    assert len(resumed.samples) == 5
    assert normalised(resumed.streamed) == normalised(whole.streamed)


def test_too_little_memory_is_a_result(tmp_path: Path) -> None:
    limited = stream(tmp_path, *SMALL, "--methods=nonshared,kvcomm,kvcmas", "--memory-limit=14MB")
    assert limited.exit_code == 0, limited.output
    shown = " ".join(limited.output.split())
    assert "kvcomm rho=0.8: T 2048+128 / 64, N=3 on tiny-llama: OOM, needs 0.0" in shown
    runs = streamed(tmp_path)
    assert not runs["kvcomm"].streamed and runs["kvcmas"].streamed
    frame = build_table("11", list(runs.values())).frame.set_index("method")
    assert frame.loc["KVComm", "state"] == "OOM" and frame.loc["KVComm", "held_ratio"] > 1
    less = (*SMALL, "--methods=kvcomm", "--workflows=1")
    assert "OOM" in stream(tmp_path / "less", *less, "--memory-limit=14MB").output
    assert "1 to run" in stream(tmp_path / "less", *less).output  # the limit was raised
    assert streamed(tmp_path / "less")["kvcomm"].streamed


def test_a_device_without_more_memory_is_a_result_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (*SMALL, "--methods=fullshared,kvcmas", "--workflows=1")
    session = Session.run

    def run(self: Session, *arguments: Any, **options: Any) -> TurnResult:
        if self.engine.method.name == "kvcmas":
            raise torch.OutOfMemoryError("no more")
        return session(self, *arguments, **options)

    monkeypatch.setattr(Session, "run", run)
    ended = stream(tmp_path, *few)
    assert ended.exit_code == 0 and "kvcmas rho=0.8: T 2048+128 / 64" in ended.output
    runs = streamed(tmp_path)
    info = runs["kvcmas"].info.stream
    assert info is not None and info.out_of_memory and runs["fullshared"].streamed
    assert info.memory_needed_bytes < info.memory_limit_bytes
    monkeypatch.undo()
    assert "0 to run" in stream(tmp_path, *few).output  # it would not fit now either
    assert stream(tmp_path, *few, "--no-resume").exit_code == 0
    assert streamed(tmp_path)["kvcmas"].streamed


def test_random_weights_of_a_shape(tmp_path: Path) -> None:
    small = ("--ctx=64", "--scale=16", "--part=context", "--outputs=16", "--workflows=1")
    ended = stream(
        tmp_path, *small, "--model=tiny-qwen2", "--load=dummy", "--methods=nonshared,kvcmas"
    )
    assert ended.exit_code == 0, ended.output
    run = streamed(tmp_path)["kvcmas"]
    assert run.info.model == "tiny-qwen2 (random weights)" and run.info.model_revision is None
    assert run.info.stream is not None and run.info.stream.load == "dummy"


def test_contexts_beyond_the_models_own_are_said(tmp_path: Path) -> None:
    beyond = ("--model=tiny-llama", "--ctx=4096", "--scale=1", "--layout=L0", "--outputs=1")
    longer = stream(tmp_path, *beyond, "--part=context", "--workflows=1", "--methods=fullshared")
    assert longer.exit_code == 0, longer.output
    shown = " ".join(longer.output.split())
    assert "contexts are longer than these models' own: tiny-llama (4096)" in shown
    assert "Contexts beyond the model's own (cost only): tiny-llama." in shown


def test_studies_and_policies(tmp_path: Path) -> None:
    few = ("--model=tiny-llama", "--ctx=2k", "--scale=64", "--workflows=1", "--outputs=64")
    for study in ("pf", "svd"):
        ended = stream(tmp_path, *few, "--study", study)
        assert ended.exit_code == 0, ended.output
    labels = {run.info.label for run in read_runs(tmp_path)}
    assert {"pf_policy=delta rho=0.8", "factorisation=randomised rho=0.8"} <= labels
    (plain,) = [r for r in read_runs(tmp_path) if r.info.label == "pf_policy=rotate"]
    later = plain.streamed[-1]
    assert later.entries.executed < later.layers * 5 and later.memory.pool_delta > 0
    refused = stream(tmp_path, *few, "--study", "threshold", "--dry-run")
    assert isinstance(refused.exception, UserError) and "give rho=" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--part=contexts",), "no part 'contexts'"),
        (("--study=rank",), "unknown study"),
        (("--methods=epic",), "give it with --cell"),
        (("--agents=two",), "is no number"),
        (("--set=rank=3",), "no chosen method has a setting"),
        (("--memory-limit=much",), "no amount of memory"),
        (("--cell=kvcmas tau=0.5",), "give rho="),
        (("--load=dummy", "--model=llava-onevision-7b", "--part=context"), "vision tower"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    ended = stream(tmp_path, "--model=tiny-llama", "--dry-run", *arguments)
    assert isinstance(ended.exception, UserError)
    assert message in str(ended.exception) and "\n" not in str(ended.exception)


def test_the_script_for_gpus_runs_here_on_a_small_model(tmp_path: Path) -> None:
    small = ("--model=tiny-qwen2", "--ctx=64", "--scale=16", "--workflows=1", "--outputs=16")
    here = ("--set=device=cpu", "--set=dtype=auto", "--methods=nonshared,kvcmas", "--rho=0.8")
    script = Path(__file__).parents[2] / "scripts" / "gpu_stream.sh"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", str(script), *small, *here],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert {run.info.method for run in read_runs(tmp_path / "runs")} == {"nonshared", "kvcmas"}
    assert "0 to run" in (tmp_path / "gpu_stream.log").read_text()


def test_profiles_hold_the_papers_sweeps() -> None:
    for name in profile_names():
        parts = load_profile(name).stream.parts
        assert {"context", "pool", "agents", "rounds"} <= set(parts)
    paper = load_profile("paper").stream
    assert [shape.ctx for shape in paper.parts["context"].at] == ["2k", "8k", "32k"]
    assert paper.parts["agents"].agents == paper.parts["rounds"].rounds == (2, 4, 8)
