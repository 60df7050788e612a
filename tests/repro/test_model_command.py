"""`repro model` on the command line."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from kvcmas.errors import UserError
from repro.cli import app
from repro.commands.model_run import check

FEW = ["--ctx", "2k", "--qps", "0,8", "--requests", "40", "--repeats", "1"]


def test_every_row_is_modelled_and_has_its_bound(tmp_path: Path) -> None:
    arguments = ["model", *FEW, "--methods", "kvcmas", "--gpu", "a100,h100", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "nothing was measured" in result.output and "bound" in result.output
    rows = pd.read_csv(tmp_path / "model.csv", comment="#")
    # NonShared and the profile's three variants of KVCMAS, two rates, two GPUs.
    assert len(rows) == 4 * 2 * 2
    assert set(rows["label"]) == {"modelled"}
    assert rows["work_bound"].notna().all() and rows["speedup_p90"].notna().all()
    a100, h100 = (rows[rows["gpu"].str.startswith(name)]["p50_s"] for name in ("A100", "H100"))
    assert (a100.to_numpy() > h100.to_numpy()).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a10"], "unknown GPU 'a10'"),
        (["--qps", "fast"], "--qps: 'fast' is no number"),
        (["--requests", "6"], "no multiple of 4 agents"),
        (["--methods", "kvcma"], "unknown method 'kvcma'"),
        (["--ctx", ","], "at least one value"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", *FEW, "--out", str(tmp_path), *arguments])
    assert isinstance(result.exception, UserError) and message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="both a load and a single stream"):
        check(tmp_path / "runs", tmp_path / "out")
