"""The registry of figures: complete, and an empty figure says what fills it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plots import style
from plots.registry import FIGURES, draw_all, draw_figure, draw_or_say, known_figures
from results.errors import ResultsError
from results.evidence import Evidence, read_evidence
from tests.analyses import chain, ranks
from tests.served import served_run


@pytest.fixture(autouse=True)
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One format is quicker than three."""
    monkeypatch.setattr(style, "FORMATS", ("svg",))


def test_all_figures_of_the_paper_are_known() -> None:
    assert tuple(FIGURES) == tuple(map(str, range(2, 14)))
    assert known_figures()[: len(FIGURES)] == tuple(FIGURES)


@pytest.mark.parametrize("number", list(FIGURES))
def test_an_empty_figure_names_its_command(number: str, tmp_path: Path) -> None:
    drawn = draw_or_say(number, Evidence(), tmp_path)
    (path,), reason = drawn.paths, drawn.empty
    assert path == tmp_path / f"figure{number}.svg"
    assert reason is not None and "repro " in reason
    assert reason.partition("made by: ")[2][:20] in path.read_text()
    with pytest.raises(ResultsError):
        draw_figure(number, Evidence(), tmp_path)


def test_analyses_are_drawn_from_their_files(tmp_path: Path) -> None:
    chain(0.1, 0.3).write(tmp_path)
    ranks({"delta": 20, "base": 10}).pack(tmp_path)
    evidence = read_evidence(tmp_path)
    for number in ("2", "3", "7"):
        assert draw_or_say(number, evidence, tmp_path).empty is None


def test_settings_that_cannot_share_a_sheet_get_one_each(tmp_path: Path) -> None:
    runs = [served_run(method, time) for method, time in (("nonshared", 1.0), ("kvcmas", 0.5))]
    one_more = served_run("fullshared", 0.4)
    other = [served_run("nonshared", 1.0, info={"engine": "vllm"})]
    other.append(served_run("kvcmas", 0.5, info={"engine": "vllm"}))
    paths = draw_figure("5", Evidence((*other, *runs, one_more)), tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in paths]
    assert names == ["figure5.svg", "tiny-llama-vllm-cpu-float32/figure5.svg"]


def test_no_sheet_is_drawn_over_another(tmp_path: Path) -> None:
    runs = [
        served_run(method, time, info={"data_sha256": sha * 64})
        for sha in "123"
        for method, time in (("nonshared", 1.0), ("kvcmas", 0.5))
    ]
    paths = draw_figure("5", Evidence(tuple(runs)), tmp_path)
    names = [path.relative_to(tmp_path).parent.as_posix() for path in paths]
    assert names == [".", (one := "tiny-llama-transformers-cpu-float32"), f"{one}-2"]


def test_contexts_share_a_sheet_whatever_other_modes_were_traced_with(tmp_path: Path) -> None:
    runs = [
        served_run(method, time, shared_tokens=shared)
        for shared in (2048, 8192)
        for method, time in (("nonshared", 1.0), ("kvcmas", 0.5))
    ]
    elsewhere = {"kind": "model", "data_sha256": "7" * 64, "bench": "T 2048+128"}
    runs.append(served_run("kvcmas", 0.1, info=elsewhere, mode="modelled"))
    (path,) = draw_figure("5", Evidence(tuple(runs)), tmp_path)
    assert "2K shared" in path.read_text() and "8K shared" in path.read_text()


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="unknown figure '1'; known here: 2, 3"):
        draw_figure("1", Evidence(), tmp_path)


def test_all_figures_of_the_paper_are_drawn_and_variants_only_with_records(tmp_path: Path) -> None:
    runs = (served_run("nonshared", 1.0), served_run("kvcmas", 0.5))
    drawn = {one.spec.number: one for one in draw_all(Evidence(runs), tmp_path)}
    assert tuple(drawn) == tuple(FIGURES)
    assert [number for number, one in drawn.items() if one.empty is None] == ["5", "8"]
