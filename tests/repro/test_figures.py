"""`repro figure`: every figure has a drawer, and what cannot be drawn is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcmas.errors import UserError
from repro.commands.figures import show_figure
from results.errors import ResultsError


def test_an_unknown_figure_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown figure '99'; known here: 2, 3, .*13"):
        show_figure("99", tmp_path, tmp_path)


@pytest.mark.parametrize("number", ["2", "3", "4", "5", "6", "7", "8", "9", "10", "11"])
def test_a_figure_without_records_says_so(number: str, tmp_path: Path) -> None:
    with pytest.raises(ResultsError):
        show_figure(number, tmp_path / "none", tmp_path)
    assert not list(tmp_path.iterdir())
