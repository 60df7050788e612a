"""`repro all` with cells that stand in for commands: everything is made, failures count."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer

from kvcmas.errors import UserError
from plots import style
from repro.commands.everything_run import FAILED, run
from tests.repro.test_plan import PROGRAM

CELLS = ["mathvista", "fidelity"]


@pytest.fixture(autouse=True)
def _svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One format is quicker than three."""
    monkeypatch.setattr(style, "FORMATS", ("svg",))


def program(word: str) -> tuple[str, ...]:
    """Does what ``word`` says instead of what the cell's command says."""
    return (sys.executable, "-c", f"import sys; sys.argv[1] = {word!r}\n{PROGRAM}")


def test_every_table_and_figure_has_its_file_and_the_report_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("smoke", tmp_path, CELLS, dry_run=False, program=program("do"))
    for number in range(1, 11):
        assert (tmp_path / "tables" / f"table{number}.csv").exists(), number
    for number in range(2, 14):
        assert (tmp_path / "figures" / f"figure{number}.svg").exists(), number
    assert len(json.loads((tmp_path / "verdicts.json").read_text())) == 37
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    shown = capsys.readouterr()
    assert shown.out.count(" done ") == 2 and "0 of 37 claims" in shown.out
    assert "[1/2] fidelity" in shown.err or "[1/2] mathvista" in shown.err


def test_a_failed_cell_is_named_and_the_rest_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        run("smoke", tmp_path, CELLS[:1], dry_run=False, program=program("fail"))
    assert ended.value.exit_code == FAILED
    assert "mathvista failed, see" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_a_dry_run_only_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("cpu", tmp_path / "out", [], dry_run=True)
    shown = capsys.readouterr().out
    assert "repro serve --profile cpu" in shown and "no cell has finished here yet" in shown
    assert not (tmp_path / "out").exists()


def test_unknown_names_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no cell 'nothing'"):
        run("smoke", tmp_path, ["nothing"], dry_run=True)
    with pytest.raises(UserError, match="unknown profile 'smok'"):
        run("smok", tmp_path, [], dry_run=True)
