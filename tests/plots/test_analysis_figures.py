"""Figures 2, 3 and 7 from synthetic CSV files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from plots import style
from plots.analysis import figure2, figure3, figure7
from results.analysis import KINDS, RETAINED, Analysis, ChainRow, RankRow
from results.errors import ResultsError

PROVENANCE = {
    "model": "some-model@0123456789abcdef",
    "dtype": "float32",
    "bench": "gsm8k",
    "data": "procedural",
    "n": "3",
    "trace_sha256": "ab" * 32,
    "warm": "2",
}
LAYERS = range(6)


def _rank_row(request: str, kind: str, tensor: str, layer: int, tokens: int) -> RankRow:
    base = kind == "base"
    rank = None if layer == 0 and not base else 5 + 2 * layer + 10 * base
    errors = [None if rank is None else max(0.0, 1 - r / (2 * rank)) for r in RETAINED]
    energy = None if rank is None else 0.8
    return RankRow(  # type: ignore[arg-type]
        request,
        kind,
        "q",
        "A0",
        None if base else "A1",
        tensor,
        layer,
        tokens,
        192,
        None,
        None,
        rank,
        energy,
        *errors,
    )


def write_ranks(directory: Path, kinds: Sequence[str] = tuple(KINDS), tokens: int = 80) -> Path:
    rows = [
        _rank_row(request, kind, tensor, layer, tokens)
        for request, kind, tensor, layer in product(("a", "b", "c"), kinds, "kv", LAYERS)
    ]
    return Analysis.of("ranks", RankRow, rows, PROVENANCE).write(directory)


def _chain_row(
    request: str, variant: tuple[str, str], turn: int, tensor: str, layer: int
) -> ChainRow:
    reference, correction = variant
    first, chained = turn == 0, reference == "source"
    exact = chained and first
    error = 0.0 if exact or layer == 0 else (0.1 if chained else 0.3) + 0.01 * turn
    action = "dense" if exact else ("correct" if correction == "kvcmas" else "reuse")
    holder = None if first else f"A{turn - 1}"
    return ChainRow(  # type: ignore[arg-type]
        request,
        reference,
        correction,
        f"A{turn}",
        turn,
        "q",
        holder,
        action,
        80,
        80,
        tensor,
        layer,
        error + 0.02 * (correction == "none"),
    )


def write_chain(directory: Path, turns: int = 4) -> Path:
    variants = list(product(("source", "context-free"), ("kvcmas", "none")))
    rows = [
        _chain_row(request, variant, turn, tensor, layer)
        for request, variant, turn, tensor, layer in product(
            ("a", "b", "c"), variants, range(turns), "kv", LAYERS
        )
    ]
    return Analysis.of("chain", ChainRow, rows, PROVENANCE).write(directory)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """All figures from plain data, each drawn once."""
    folder = tmp_path_factory.mktemp("figures")
    ranks, chain = write_ranks(folder), write_chain(folder)
    return {
        "figure2": figure2([ranks], folder),
        "figure3": figure3([chain], folder),
        "figure7": figure7([ranks], folder),
    }


@pytest.fixture
def svg_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One format is quicker than three."""
    monkeypatch.setattr(style, "FORMATS", ("svg",))


def test_figures_are_written_in_every_format(drawn: dict[str, list[Path]]) -> None:
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for name, paths in drawn.items():
        assert [path.name for path in paths] == [f"{name}.{suffix}" for suffix in starts]
        for path in paths:
            assert path.read_bytes().startswith(starts[path.suffix[1:]])


def test_equal_data_give_equal_files(drawn: dict[str, list[Path]], tmp_path: Path) -> None:
    for first, second in zip(
        drawn["figure2"], figure2([write_ranks(tmp_path)], tmp_path), strict=True
    ):
        assert first.read_bytes() == second.read_bytes(), first.suffix


def _text(paths: Sequence[Path]) -> str:
    """What a figure says; a line that was wrapped counts as one."""
    svg = next(path for path in paths if path.suffix == ".svg").read_text(encoding="utf-8")
    return " ".join(re.findall(r">([^<>]*\S[^<>]*)<", svg))


def test_figure2_says_what_it_averages(drawn: dict[str, list[Path]]) -> None:
    text = _text(drawn["figure2"])
    # Ranks grow by 2 a layer from 15 (base) and, without layer 0, from 7 (delta).
    assert "base 20.0" in text
    assert "delta 11.0" in text
    assert "rank 32" in text
    assert "data: procedural" in text
    assert "some-model@0123456789" in text


def test_figure3_shows_the_exact_first_agent(drawn: dict[str, list[Path]]) -> None:
    text = _text(drawn["figure3"])
    # Layers 1 to 5 of 6 err by .11 to .13 (chained) at A1 to A3.
    assert f"chained {5 / 6 * 0.12:.3f}" in text
    assert f"non-chained {5 / 6 * 0.32:.3f}" in text
    assert "A0" in text


def test_figure7_says_what_rank_8_keeps(drawn: dict[str, list[Path]]) -> None:
    text = _text(drawn["figure7"])
    assert "system swapped 80%" in text
    assert "90% kept" in text


@pytest.mark.usefixtures("svg_only")
def test_several_files_are_named_on_their_panels(tmp_path: Path) -> None:
    one, two = write_ranks(tmp_path / "1"), write_ranks(tmp_path / "2")
    text = _text(figure2([one, two], tmp_path))
    assert text.count("Keys: some-model, gsm8k") == 2


@pytest.mark.usefixtures("svg_only")
def test_short_segments_are_left_out_where_there_are_long_ones(tmp_path: Path) -> None:
    csv = write_ranks(tmp_path)
    short = [_rank_row("d", "delta", t, layer, 8) for t, layer in product("kv", LAYERS)]
    frame = Analysis.read(csv, "ranks").frame
    both = Analysis.of("ranks", RankRow, [*frame.itertuples(index=False), *short], PROVENANCE)
    assert "base 80, delta 80" in _text(figure2([both.write(tmp_path / "both")], tmp_path))
    only_short = write_ranks(tmp_path / "short", tokens=8)
    assert "base 8, delta 8" in _text(figure2([only_short], tmp_path))


def test_a_figure_without_its_data_is_refused(tmp_path: Path) -> None:
    ranks = write_ranks(tmp_path, kinds=("base", "delta"))
    with pytest.raises(ResultsError, match="pf_system"):
        figure7([ranks], tmp_path)
    with pytest.raises(ResultsError, match="no file of analysis 'chain'"):
        figure3([ranks], tmp_path)
    with pytest.raises(ResultsError, match="cannot read"):
        figure2([tmp_path / "absent.csv"], tmp_path)
    with pytest.raises(ResultsError, match="warm up longer"):
        figure3([write_chain(tmp_path / "cold", turns=1)], tmp_path)


def test_style_stays_inside_its_block() -> None:
    before = dict(matplotlib.rcParams)
    with style.styled():
        assert matplotlib.rcParams["font.size"] != before["font.size"]
    assert dict(matplotlib.rcParams) == before


def test_every_method_has_a_look_of_its_own() -> None:
    from results.names import METHODS

    assert set(METHODS) | {"oracle"} == set(style.METHODS)
    looks = list(style.METHODS.values())
    assert len({look.marker for look in looks}) == len(looks)
    assert len({look.colour for look in looks}) == len(looks)
    assert style.look("somebody:Else") is style.OTHER


# Viénot, Brettel and Mollon (1999), linear RGB.
DEFICIENCIES = {
    "protanopia": [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
    "deuteranopia": [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
}


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_are_told_apart(deficiency: str) -> None:
    names, seen = list(style.METHODS), []
    for look in style.METHODS.values():
        rgb = np.array([int(look.colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        seen.append(_lab(np.array(DEFICIENCIES[deficiency]) @ linear))
    for i, j in product(range(len(seen)), repeat=2):
        if i < j:
            distance = float(np.linalg.norm(seen[i] - seen[j]))
            assert distance > 8, (names[i], names[j], distance)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(np.clip(to_xyz @ linear / [0.9505, 1, 1.089], 1e-4, None))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.0, 0.0, 0.0], [0.0, 0.1, 0.2]),
        ([1.0, 1.0], [0.9, 1.0]),
        ([0.0, 0.05, 0.12], [0.0, 0.1, 0.2]),
    ],
)
def test_labels_are_spread_within_the_panel(heights: list[float], expected: list[float]) -> None:
    assert style.spread(heights, 0.1, 1) == pytest.approx(expected)


def test_labels_never_touch() -> None:
    heights = sorted(np.random.default_rng(0).random(9).tolist())
    placed = style.spread(heights, 0.1, 1)
    assert all(b - a > 0.1 - 1e-9 for a, b in pairwise(placed))
    assert placed[0] >= 0 and placed[-1] <= 1 + 1e-9


def test_small_print_stays_within_the_figure() -> None:
    commits = ", ".join(f"{i:x}" * 40 for i in range(2, 12))
    with style.styled():
        figure = Figure(figsize=(style.WIDTH, 2), layout="constrained")
        style.small_print(figure, [f"git commit: {commits}; runs: 10", "m" * 20])
        FigureCanvasAgg(figure).draw()
        (text,) = figure.texts
        extent = text.get_window_extent()
    assert figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1
    assert figure.bbox.y0 <= extent.y0 and extent.y1 <= figure.bbox.y1
