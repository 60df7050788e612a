"""Figure 4-thresholds from synthetic runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plots import style
from plots.registry import draw_all
from plots.thresholds import FIGURES
from results.errors import ResultsError
from results.evidence import Evidence
from tests.results.conftest import _edge, _run, _turn

DRAW: Callable[..., list[Path]] = FIGURES["4-thresholds"]


@pytest.fixture(autouse=True)
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "FORMATS", ("svg",))


def calibrated(entropies: list[float | None], **changes: Any) -> Any:
    settings = {"tau": 0.2} | changes.pop("settings", {})
    turns = []
    for index, entropy in enumerate(entropies):
        used = entropy is not None and entropy <= 0.2
        refused = {} if used else {"action": "dense", "executed": 20}
        turns.append(_turn(index, edges=(_edge(entropy=entropy, **refused),)))
    told = {"method": "kvcmas", "label": "rho=0.8", "target_rho": 0.8} | changes
    correct = tuple(True for _ in entropies)
    return _run(correct=correct, turns=tuple(turns), settings=settings, **told)


def test_a_panel_per_calibrated_method(tmp_path: Path) -> None:
    other = calibrated([0.1, 0.4, 1e-17, None], method="kvcomm", settings={"gamma": 0.3})
    (path,) = DRAW([calibrated([0.1, 0.1, 0.5, None]), other, _run()], tmp_path)
    text = path.read_text()
    for part in ("KVCMAS, n = 4: tau = 0.2", "KVComm, n = 4: gamma = 0.3", "quarter 4"):
        assert part in text


def test_settings_have_panels_of_their_own(tmp_path: Path) -> None:
    here, there = calibrated([0.1] * 4), calibrated([0.1] * 4, hardware="Another CPU")
    (path,) = DRAW([here, there], tmp_path)
    text = path.read_text()
    assert text.count("KVCMAS, n = 4: tau = 0.2") == 2
    assert "hardware=Another CPU" in text and "hardware=Some CPU" in text


def test_what_has_no_target_or_too_few_requests_is_left_out(tmp_path: Path) -> None:
    without = calibrated([0.1] * 4, target_rho=None, label="")
    few = calibrated([0.1] * 3)
    every = calibrated([0.1] * 4, label="rho=0.8 accept all")
    first = tuple(_turn(index, edges=(_edge(first=True),)) for index in range(4))
    nothing = _run((True,) * 4, first, method="kvcmas", target_rho=0.8, label="rho=0.8")
    for run in (without, few, every, nothing, _run()):
        with pytest.raises(ResultsError, match="made by: repro accuracy"):
            DRAW([run], tmp_path)


def test_it_has_a_title_of_its_own(tmp_path: Path) -> None:
    evidence = Evidence(runs=(calibrated([0.1] * 4),))
    titles = {drawn.spec.number: drawn.spec.title for drawn in draw_all(evidence, tmp_path)}
    assert titles["4-thresholds"] == "reuse ratio over the gate's threshold"
