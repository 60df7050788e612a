"""Files and summaries of `repro analyze`, on rows made by hand."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from results.analysis import Analysis, AnalysisError, ChainRow, CoverageRow, RankRow
from results.analysis_summary import chain_summary, comparable, coverage_summary, rank_summary


def _rank(request: str, slot: str, tokens: int, layer: int, rank: int | None) -> RankRow:
    norm = 1e-7 if rank is None else 0.2
    return RankRow(
        request,
        "delta",
        slot,
        "A0",
        "A1",
        "k",
        layer,
        tokens,
        64,
        None,
        norm,
        rank,
        None if rank is None else 0.9,
        *[0.5] * 7,
    )


RANKS = [
    _rank("a", "q", 80, 0, None),
    _rank("a", "q", 80, 1, 10),
    _rank("a", "q", 80, 2, 20),
    _rank("a", "out0", 16, 1, 4),
    _rank("a", "out0", 16, 2, 8),
    _rank("b", "q", 90, 1, 30),
    _rank("b", "q", 90, 2, 40),
]


def _analysis() -> Analysis:
    return Analysis.of("ranks", RankRow, RANKS, {"model": "m@1", "command": "a\n b"}, ["x: y", "z"])


def test_file_gives_back_rows_and_provenance(tmp_path: Path) -> None:
    path = _analysis().write(tmp_path / "new")
    assert path.read_text().splitlines()[:4] == [
        "# analysis: ranks",
        "# model: m@1",
        "# command: a b",
        "# note: x: y",
    ]
    found = Analysis.read(path, "ranks")
    assert found.provenance == {"model": "m@1", "command": "a b"}
    assert found.notes == ("x: y", "z")
    assert found.frame.columns.tolist() == list(RankRow._fields)
    assert found.frame["effective_rank"].isna().tolist() == [True] + [False] * 6
    assert found.frame["tokens"].tolist() == [row.tokens for row in RANKS]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = _analysis().write(tmp_path)
    with pytest.raises(AnalysisError, match="no file of analysis 'chain'"):
        Analysis.read(path, "chain")
    with pytest.raises(AnalysisError, match="cannot read"):
        Analysis.read(tmp_path / "absent.csv", "ranks")
    bare = tmp_path / "bare.csv"
    bare.write_text("a,b\n1,2\n")
    with pytest.raises(AnalysisError, match="no file of analysis"):
        Analysis.read(bare, "ranks")
    with pytest.raises(AnalysisError, match="cannot write"):
        _analysis().write(bare)


def test_rank_summary_separates_long_segments() -> None:
    rows = rank_summary(_analysis().frame).set_index(["slots", "least_tokens"])
    assert rows.loc[("q", 64), "effective_rank"] == pytest.approx((15 + 35) / 2)
    assert rows.loc[("all", 1), "effective_rank"] == pytest.approx((15 + 35 + 6) / 3)
    assert rows.loc[("all", 64), "segments"] == 2
    assert rows.loc[("all", 64), "rank_max_layer"] == 30
    assert ("out", 64) not in rows.index
    # Layer 0 is no part of a mean.
    assert rows.loc[("q", 1), "relative_norm"] == pytest.approx(0.2)
    assert rows.loc[("q", 1), "effective_rank_low"] == 15


def _chain(
    request: str,
    node: str,
    slot: str,
    reference: str,
    error: float,
    *,
    action: str = "correct",
    holder: str | None = "A0",
    correction: str = "kvcmas",
) -> list[ChainRow]:
    return [
        ChainRow(  # type: ignore[arg-type]
            request,
            reference,
            correction,
            node,
            int(node[1]),
            slot,
            holder,
            action,
            8,
            8,
            "k",
            layer,
            error * layer,
        )
        for layer in range(3)
    ]


def _chained() -> Analysis:
    rows: list[ChainRow] = []
    for request, extra in (("a", 0.0), ("b", 0.2)):
        rows += _chain(request, "A0", "q", "source", 0, action="dense", holder=None)
        rows += _chain(request, "A0", "q", "context-free", 0.5, holder=None)
        rows += _chain(request, "A1", "q", "source", 0.1 + extra)
        rows += _chain(request, "A1", "q", "context-free", 0.4 + extra)
        # The chained pool had no anchor here: exact, and no evidence of anything.
        rows += _chain(request, "A1", "out0", "source", 0, action="dense")
        rows += _chain(request, "A1", "out0", "context-free", 0.9)
        rows += _chain(request, "A1", "q", "source", 0.7, action="reuse", correction="none")
    return Analysis.of("chain", ChainRow, rows, {})


def test_only_segments_corrected_twice_are_compared() -> None:
    frame = _chained().frame
    assert set(zip(*comparable(frame)[["node", "slot"]].T.to_numpy(), strict=True)) == {("A1", "q")}
    places = comparable(frame, first=True)[["node", "slot"]].drop_duplicates()
    assert places.to_numpy().tolist() == [["A0", "q"], ["A1", "q"]]


def test_chain_summary_pairs_by_segment() -> None:
    rows = chain_summary(_chained().frame).set_index(["scope", "reference", "correction"])
    assert rows.loc[("A0", "source", "kvcmas"), ["error", "dense"]].tolist() == [0, 2]
    assert rows.loc[("A0", "context-free", "kvcmas"), "error"] == pytest.approx(0.5)
    assert rows.loc[("A1", "source", "kvcmas"), "error"] == pytest.approx(0.2)
    assert rows.loc[("A1", "source", "none"), "error"] == pytest.approx(0.7)
    difference = rows.loc[("comparable", "chained - non-chained", "kvcmas")]
    # Both pairs differ by -.3, so the interval is a point although the errors vary.
    values = difference[["error", "error_low", "error_high"]].tolist()
    assert values == pytest.approx([-0.3] * 3)


def test_coverage_is_pooled_over_requests() -> None:
    def row(request: str, criterion: str, before: float, after: float) -> CoverageRow:
        return CoverageRow(
            request,
            "A1",
            "token",
            criterion,
            0.9,
            100,
            10,
            0.1,
            before,
            after,
            before**0.5,
            after**0.5,
        )

    rows = [
        row("a", "deviation", 1.0, 0.5),
        row("a", "random", 1.0, 0.9),
        row("b", "deviation", 9.0, 8.5),
        row("b", "random", 9.0, 8.1),
    ]
    frame = Analysis.of("coverage", CoverageRow, rows, {}).frame
    found = coverage_summary(frame).set_index("criterion")
    assert found.loc["deviation", "coverage_energy"] == pytest.approx(0.1)
    assert found.loc["deviation", "relative_energy"] == pytest.approx(1.0)
    assert found.loc["random", "coverage_energy"] == pytest.approx(0.1)
    norm = 1 - (0.5**0.5 + 8.5**0.5) / 4
    assert found.loc["deviation", "coverage_norm"] == pytest.approx(norm)
    low, high = found.loc["deviation", ["coverage_energy_low", "coverage_energy_high"]]
    assert low == pytest.approx(0.5 / 9) and high == pytest.approx(0.5)


def test_one_request_has_no_interval() -> None:
    rows = [
        CoverageRow("a", "A1", "token", criterion, 0.9, 10, 1, 0.1, 1, 0.9, 1, 0.95)
        for criterion, _ in product(("deviation", "random"), range(1))
    ]
    found = coverage_summary(Analysis.of("coverage", CoverageRow, rows, {}).frame)
    assert found["coverage_energy_low"].isna().all()
