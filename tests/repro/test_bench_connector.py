"""`repro bench connector`: real engines, one process each, on the same requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from results.goals import read_bench


@pytest.mark.vllm
def test_three_engines_serve_the_same_requests(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "pairs.json"
    arguments = ["bench", "connector", "--model", "tiny-llama", "--shared", "64"]
    # Starting processes leaves this one a helper of multiprocessing that never ends before it does.
    done = subprocess.run(
        [sys.executable, "-m", "repro", *arguments, "--requests", "3", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "A/A control" in done.stdout
    record = read_bench(out)
    control, connector = record.rows
    assert len(control.values) == len(connector.values) == 3
    assert min(connector.seconds) > 0
    assert control.goal is None
    assert connector.goal == pytest.approx(1.03)
    # The ratios share what they are divided by: the stock engine's seconds.
    stock = [s / v for s, v in zip(control.seconds, control.values, strict=True)]
    assert stock == pytest.approx(
        [s / v for s, v in zip(connector.seconds, connector.values, strict=True)]
    )
