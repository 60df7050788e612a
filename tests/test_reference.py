"""What is committed beside the records is what the records say."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from repro.commands.reference import stale_files
from tests.analyses import chain

REFERENCE = Path(__file__).resolve().parent.parent / "results" / "reference"


def test_tables_verdicts_overview_and_figures_agree_with_the_committed_records() -> None:
    assert stale_files(REFERENCE) == [], "run: repro reference"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from repro.commands.reference import reference

    chain(0.1, 0.3).pack(tmp_path / "records")
    reference(tmp_path)
    return tmp_path


def test_what_was_made_is_fresh_and_empty_tables_are_left_out(folder: Path) -> None:
    assert stale_files(folder) == []
    assert [path.name for path in (folder / "figures").glob("*.png")] == ["figure3.png"]
    assert not (folder / "tables").exists()
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "| records | analysis chain | 1 | some-model |" in text
    assert "`repro analyze x --out else`" in text


def test_every_kind_of_change_is_seen(folder: Path) -> None:
    (folder / "tables").mkdir()
    (folder / "tables" / "table99.csv").write_text("left over")
    assert stale_files(folder) == ["tables/table99.csv"]
    (folder / "tables" / "table99.csv").unlink()
    verdicts = folder / "verdicts.json"
    verdicts.write_text(verdicts.read_text(encoding="utf-8").replace('"agrees"', '"disagrees"'))
    assert stale_files(folder) == ["verdicts.json"]
    shutil.rmtree(folder / "records")
    assert stale_files(folder) == ["README.md", "verdicts.json", "figures"]
