"""`repro bench connector`: ratios are paired, the engines are real, and both kinds answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repro.cli import app
from repro.runners.bench_connector import ENGINES, Overhead


def test_ratios_are_paired_by_request() -> None:
    overhead = Overhead(
        {
            "stock": (1.0, 2.0, 4.0),
            "control": (1.0, 2.0, 4.0),
            "connector": (1.1, 2.0, 4.8),
        }
    )
    assert overhead.requests == 3
    assert overhead.ratio("control") == (1.0, 1.0, 1.0)
    ratio = overhead.ratio("connector")
    assert ratio.value == pytest.approx(1.1)
    assert (ratio.low, ratio.high) == pytest.approx((1.0, 1.2))


@pytest.mark.vllm
def test_three_engines_serve_the_same_requests(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "pairs.json"
    arguments = ["bench", "connector", "--model", "tiny-llama", "--shared", "64"]
    done = CliRunner().invoke(app, [*arguments, "--requests", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "A/A control" in done.stdout
    record = json.loads(out.read_text())
    assert set(record["ttft"]) == set(ENGINES)
    assert all(len(times) == 3 and min(times) > 0 for times in record["ttft"].values())
    assert record["environment"]["packages"]["torch"].startswith("2.")
