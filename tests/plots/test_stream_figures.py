"""Figures 12 and 13 from synthetic single streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from plots import style
from plots.stream import FIGURES, rank_cells
from results.errors import ResultsError
from results.records import Run
from tests.streamed import stream_run


@pytest.fixture(autouse=True)
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One format is quicker than three."""
    monkeypatch.setattr(style, "FORMATS", ("svg",))


def drawn(number: str, runs: list[Run], out: Path) -> str:
    (path,) = FIGURES[number](runs, out)
    assert path.name == f"figure{number}.svg"
    return path.read_text()


def ranked(base: int | None, delta: int | None) -> Run:
    label = f"rank_base={base} rank_delta={delta} rho=0.8"
    return stream_run("kvcmas", 0.3, label=label, settings={"rank_base": base, "rank_delta": delta})


def test_methods_by_context_at_matched_ratios(tmp_path: Path) -> None:
    runs = []
    for shared in (2048, 32_768):
        cell = {"shared_tokens": shared}
        runs += [
            stream_run("nonshared", 1.0, **cell),
            stream_run("droidspeak", 0.5, **cell),
            stream_run("kvcmas", 0.3, **cell),
            stream_run("kvcomm", 1.0, out_of_memory=shared > 2048, **cell),
        ]
    runs.append(stream_run("kvcmas", 0.9, label="capacity=2 rho=0.8"))
    text = drawn("12", runs, tmp_path)
    for part in ("2K", "32K", "rho 0.9 | 0.8", "TTFT, s", "tokens/s", "held, GB", "KVComm"):
        assert part in text
    assert text.count("OOM, 1.0 GB") == 3  # one panel each
    assert "rho 0.8 | 0.6" not in text
    assert "n = 12 reuse requests a cell" in text


def test_ranks(tmp_path: Path) -> None:
    runs = [ranked(None, None), ranked(16, 32), ranked(16, 16)]
    ranks = [
        [c.run.info.settings[f"rank_{k}"] for k in ("base", "delta")] for c in rank_cells(runs)
    ]
    assert ranks == [[16, 16], [16, 32], [None, None]]
    text = drawn("13", runs, tmp_path)
    for part in ("16, 32", "full, full", "not measured", "first-token KL, nats", "held, GB"):
        assert part in text


@pytest.mark.parametrize("number", ["12", "13"])
def test_nothing_to_compare_is_said(number: str, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="made by: repro stream"):
        FIGURES[number]([stream_run("kvcmas", 0.3)], tmp_path)
