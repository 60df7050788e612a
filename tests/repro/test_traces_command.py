"""`repro trace`, and the page that documents it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvcmas.errors import UserError
from repro.commands.traces import app
from traces.schema import read_trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "traces.md"


def trace(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def generated(out: Path, *more: str) -> Path:
    result = trace("generate", "--scale=64", "--workflows=2", f"--out={out}", *more)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    return out


def fenced(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.M)
    return str(block)


def test_generate_writes_what_was_asked_for(tmp_path: Path) -> None:
    path = generated(tmp_path / "t.jsonl", "--ctx=8k", "--outputs=512", "--vocab=300", "--seed=3")
    header = read_trace(path).header
    assert (header.workflows, header.vocab, header.topology) == (2, 300, "fully_connected")
    assert header.origin["scale"] == 64
    assert header.origin["seeds"] == dict.fromkeys(("system", "private", "shared", "output"), 3)
    assert header.origin["lengths"]["shared"] == 8192 // 64
    assert header.origin["lengths"]["output"] == 512 // 64


def test_the_seed_decides_the_file(tmp_path: Path) -> None:
    a, b, c = (
        generated(tmp_path / f"{i}.jsonl", "--vocab=300", f"--seed={seed}").read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert a == b
    assert a != c


@pytest.mark.usefixtures("tiny_llama")
def test_a_models_special_tokens_are_not_drawn(tmp_path: Path) -> None:
    path = generated(tmp_path / "t.jsonl", "--model=tiny-llama", "--ctx=32k")
    read = read_trace(path)
    # One token per byte behind three special ones.
    assert (read.header.vocab, read.header.origin["exclude"]) == (259, [0, 1, 2])
    drawn = {i for w in read.workflows for turn in w.turns for i in turn.prompt.ids}
    assert 3 <= min(drawn) < 9


@pytest.mark.usefixtures("tiny_llama")
def test_a_trace_must_fit_the_model(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    result = trace("generate", "--model=tiny-llama", "--ctx=8k", f"--out={out}")
    assert isinstance(result.exception, UserError)
    assert re.search("allows 4096 tokens, the last turn takes 102", str(result.exception))
    assert not out.exists()


def test_show_has_header_lengths_and_bounds(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace("generate", "--workflows=17", "--vocab=300", f"--out={path}")
    shown = trace("show", str(path))
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["scale", "1.0"] in lines
    assert ["A3", "4021", "1589", "2432", "128", "0.395"] in lines
    assert ["0.8", "formula", "0.800", "1.55"] in lines
    (harness,) = [line for line in lines if line[:3] == ["0.6", "public", "harness"]]
    assert "44/68" in harness
    assert sum("controlled" in line for line in lines) == 2


def test_show_takes_a_layout_without_reuse(tmp_path: Path) -> None:
    path = generated(tmp_path / "t.jsonl", "--vocab=300", "--agents=1", "--layout=L0")
    assert "f = nan" in trace("show", str(path)).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "either --vocab or --model"),
        (["generate", "--vocab=9", "--model=tiny-llama"], "either --vocab or --model"),
        (["generate", "--vocab=9", "--ctx=long"], "'long' is no number of tokens"),
        (["generate", "--vocab=9", "--ctx=0"], "shared=0"),
        (["generate", "--vocab=9", "--scale=0"], "scale=0"),
        (["generate", "--vocab=9", "--seed=-1"], "negative"),
        (["generate", "--model=tiny-lama"], "tiny-llama"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = trace(*arguments, f"--out={tmp_path / 't.jsonl'}")
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_show_names_a_missing_file(tmp_path: Path) -> None:
    assert "cannot read trace" in str(trace("show", str(tmp_path / "none")).exception)


def test_the_documented_example_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = shlex.split(fenced("console"))
    assert command[:2] == ["repro", "trace"]
    assert trace(*command[2:]).exit_code == 0
    written = Path("tiny.jsonl").read_text()
    assert fenced("json").replace("\n", "") == written.replace("\n", "")
    exec(compile(fenced("python"), str(PAGE), "exec"), {})
    assert "A0 0.0\nA1 0.5\n" in capsys.readouterr().out
