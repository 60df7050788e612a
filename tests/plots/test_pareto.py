"""Figure 4: where points land, what the band spans, what is said about results outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from plots import pareto
from plots.pareto import _front, _limits, _Point, figure4
from results.errors import ResultsError


def point(method: str, latency: float, accuracy: float) -> _Point:
    return _Point(method, method, False, latency, accuracy, accuracy - 5, accuracy + 5)


DENSE, REUSED = point("nonshared", 10, 60), point("fullshared", 6, 40)


def test_limits_follow_the_span_of_the_two_references() -> None:
    far = point("graphflow", 50, 2)
    assert _limits([DENSE, REUSED, far]) == (3, 13, 25, 75)
    assert _limits([DENSE, far]).right > 50  # without the span everything is inside
    same = _limits([point("nonshared", 10, 50), point("fullshared", 10, 50)])
    assert same.right > 10 > same.left and same.top > 50 > same.bottom
    assert _limits([point("nonshared", 1, 3), point("fullshared", 0.1, 1)])[::2] == (0, 0)


def test_the_front_holds_what_no_other_beats_in_both() -> None:
    beaten, best = point("kvcomm", 8, 45), point("kvcmas", 7, 58)
    assert _front([DENSE, beaten, best, REUSED]) == [REUSED, best, DENSE]
    assert _front([point("a", 5, 50), point("b", 5, 60)]) == [point("b", 5, 60)]


@pytest.mark.parametrize(
    ("latency", "accuracy", "marker"), [(99, 50, ">"), (0, 50, "<"), (8, 99, "^"), (8, 1, "v")]
)
def test_a_triangle_points_to_a_result_outside(
    latency: float, accuracy: float, marker: str
) -> None:
    assert pareto._towards(point("kvcomm", latency, accuracy), _limits([DENSE, REUSED])) == marker


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr(pareto, "save", lambda figure, out, name: figures.append(figure) or [])
    return figures


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts if text.get_text()]


def run(make_run, method: str, correct: int, latency: float, **info: object):
    made = make_run(tuple(i < correct for i in range(20)), method=method, **info)
    samples = tuple(s.model_copy(update={"e2e_s": latency}) for s in made.samples)
    return type(made)(made.info, made.turns, samples)


def test_a_panel_per_benchmark_and_values_only_outside(
    make_run, drawn: list[Figure], tmp_path: Path
) -> None:
    runs = [
        run(make_run, "nonshared", 12, 10.0),
        run(make_run, "fullshared", 8, 6.0),
        run(make_run, "kvcmas", 11, 7.0, label="rho=0.8"),
        run(make_run, "graphflow", 1, 50.0),
        run(make_run, "nonshared", 12, 10.0, bench="mmlu", data_sha256="0" * 64),
    ]
    figure4(runs, tmp_path)
    (figure,) = drawn
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["MMLU, n = 20", "GSM8K, n = 20"]
    assert texts(figure) == ["50.0 s, 5.0%"]
    (band,) = figure.axes[1].patches
    assert (band.get_xy(), band.get_width(), band.get_height()) == ((6, 40), 4, 20)
    names = [text.get_text() for text in figure.legends[0].texts]
    assert names == ["NonShared", "FullShared", "GraphFlow", "KVCMAS rho=0.8"]


def test_values_at_one_place_are_written_one_above_another(
    make_run, drawn: list[Figure], tmp_path: Path
) -> None:
    seconds = {"nonshared": 10.0, "fullshared": 6.0, "kvcomm": 50.0, "kvcmas": 60.0}
    figure4([run(make_run, method, 12, latency) for method, latency in seconds.items()], tmp_path)
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    first, second = (text.get_window_extent() for text in axes.texts if text.get_text())
    assert not first.overlaps(second)


def test_the_files_are_written(make_run, tmp_path: Path) -> None:
    paths = figure4([run(make_run, "nonshared", 12, 10.0)], tmp_path)
    assert [path.name for path in paths] == ["figure4.png", "figure4.svg", "figure4.pdf"]
    assert all(path.stat().st_size for path in paths)


def test_without_runs_the_command_is_named(make_replay, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="repro accuracy --bench BENCH"):
        figure4([], tmp_path)
    with pytest.raises(ResultsError, match="no accuracy run"):
        figure4([make_replay()], tmp_path)
