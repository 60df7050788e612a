"""Rows and records of benches."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.errors import ResultsError
from results.goals import BenchRecord, BenchRow, read_bench


def test_ratios_are_paired_and_their_median_is_held_against_the_goal() -> None:
    row = BenchRow.paired("a / b", [2.0, 9.0, 4.0], [1.0, 3.0, 1.0], 3.0)
    assert row.values == (2.0, 3.0, 4.0)
    assert row.seconds == (2.0, 9.0, 4.0)
    assert row.estimate.value == 3
    assert row.estimate.low >= 2 and row.estimate.high <= 4
    assert row.met is True
    assert row.model_copy(update={"goal": 2.9}).met is False
    assert row.model_copy(update={"goal": 3.1, "at_least": True}).met is False
    assert row.model_copy(update={"goal": None}).met is None
    with pytest.raises(ValueError, match="zip"):
        BenchRow.paired("a / b", [1.0], [1.0, 2.0])


def test_cells_say_what_was_asked_and_a_single_round_has_no_interval() -> None:
    row = BenchRow(name="x", values=(0.25,), goal=0.5)
    assert row.cells == ["x", "0.25", "", "1", "<= 0.5", "yes"]
    at_least = BenchRow(name="x", values=(1.0, 1.0), goal=2, at_least=True)
    assert at_least.cells == ["x", "1", "1 to 1", "2", ">= 2", "no"]
    assert BenchRow(name="x", values=(1.0,)).cells[4:] == ["", ""]


def test_a_record_is_read_as_it_was_written_and_nothing_else_is(tmp_path: Path) -> None:
    row = BenchRow(name="x | y", values=(0.5, 1.5))
    record = BenchRecord(bench="turn", title="T", rows=(row,), notes=("n",), environment={"a": 1})
    path = tmp_path / "turn.json"
    path.write_text(record.model_dump_json())
    assert read_bench(path) == record
    assert "| x \\| y | 1 | 0.5 to 1.5 | 2 |  |  |" in record.to_markdown()
    path.write_text("{}")
    with pytest.raises(ResultsError, match="no record of a bench"):
        read_bench(path)
    with pytest.raises(ResultsError, match="cannot read"):
        read_bench(tmp_path / "none.json")
