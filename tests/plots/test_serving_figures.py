"""Figures 5, 6 and 8 to 11 from synthetic runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from plots import style
from plots.serving import FIGURES
from results.errors import ResultsError
from results.records import Run
from tests.served import served_run


@pytest.fixture(autouse=True)
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One format is quicker than three."""
    monkeypatch.setattr(style, "FORMATS", ("svg",))


def runs() -> list[Run]:
    made = []
    for shared, output in ((2048, 128), (8192, 128), (2048, 512)):
        for qps in (0.0, 8.0):
            trace = {"shared_tokens": shared, "output_tokens": output, "qps": qps}
            made += [served_run("nonshared", 1.0, **trace), served_run("kvcmas", 0.5, **trace)]
            made.append(
                served_run(
                    "kvcmas",
                    0.8,
                    label="chained=False",
                    settings={"chained": False, "first_turn": "corrected"},
                    **trace,
                )
            )
            made.append(
                served_run("kvcomm", 0.8, out_of_memory=shared > 2048, rho_method=0.8, **trace)
            )
    return made


def drawn(number: str, made: list[Run], out: Path) -> str:
    (path,) = FIGURES[number](made, out)
    assert path.name == f"figure{number}.svg"
    return path.read_text()


@pytest.mark.parametrize("number", ["5", "8"])
def test_contexts_and_rates(number: str, tmp_path: Path) -> None:
    text = drawn(number, runs(), tmp_path)
    for part in (
        "2K shared",
        "8K shared",
        "KVComm: out of memory, 1 GB",
        "agent requests/s (QPS)",
        f"p{50 if number == '5' else 90} TTFT, s",
        "bound 1.50x",
        "real; layout T",
        "n = 40",
    ):
        assert part in text
    assert "chained" not in text


@pytest.mark.parametrize("number", ["6", "9"])
def test_chaining(number: str, tmp_path: Path) -> None:
    text = drawn(number, runs(), tmp_path)
    assert "non-chained" in text and "KVComm" not in text


@pytest.mark.parametrize("number", ["10", "11"])
def test_lengths_of_outputs(number: str, tmp_path: Path) -> None:
    text = drawn(number, runs(), tmp_path)
    assert "0.375K generated" in text and "1.5K generated" in text and "8K" not in text


@pytest.mark.parametrize("number", list(FIGURES))
def test_nothing_to_draw_is_one_clear_line(number: str, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=f"no serving cell for figure{number}"):
        FIGURES[number]([], tmp_path)


def test_a_tail_needs_requests(tmp_path: Path) -> None:
    few = [served_run(method, 1.0, workflows=4) for method in ("nonshared", "kvcmas")]
    drawn("5", few, tmp_path)
    with pytest.raises(ResultsError, match="40 requests"):
        FIGURES["8"](few, tmp_path)


def test_settings_are_not_mixed(tmp_path: Path) -> None:
    mixed = [*runs(), served_run("kvcmas", 0.5, info={"engine": "vllm"})]
    with pytest.raises(ResultsError, match="cannot share a figure"):
        FIGURES["5"](mixed, tmp_path)


def test_cells_that_did_not_run_have_sheets_of_their_own(tmp_path: Path) -> None:
    other = [
        served_run(method, service, mode=mode, info={"kind": kind})
        for kind, mode in (("emulate", "emulated"), ("model", "modelled"))
        for method, service in (("nonshared", 1.0), ("kvcmas", 0.5))
    ]
    for mode in ("emulated", "modelled"):
        text = drawn(f"5-{mode}", [*runs(), *other], tmp_path)
        assert mode.upper() in text and f"{mode}; layout T" in text and "8K" not in text
    assert "EMULATED" not in drawn("5", [*runs(), *other], tmp_path)
