"""Committed verdicts: written, compared, and damage named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from results.errors import ClaimError
from results.ledger import VERDICTS_FILE, as_text, changes
from results.verdicts import judged
from tests.analyses import chain


def test_what_is_written_is_what_is_found_again(tmp_path: Path) -> None:
    rows = judged((), [chain(0.1, 0.3)])
    path = tmp_path / VERDICTS_FILE
    path.write_text(as_text(rows))
    assert changes(rows, path) == []
    (item,) = [item for item in json.loads(as_text(rows)) if item["id"] == "C16"]
    assert item["verdict"] == "agrees"
    assert item["runs"] == [chain(0.1, 0.3).key]
    assert item["measured"][0]["value"] == pytest.approx(-0.2)
    assert item["command"].startswith("repro analyze chain")


def test_a_changed_verdict_is_named(tmp_path: Path) -> None:
    path = tmp_path / VERDICTS_FILE
    path.write_text(as_text(judged((), [chain(0.1, 0.3)])))
    assert changes(judged((), [chain(0.3, 0.1)]), path) == ["C16: agrees -> disagrees"]
    assert changes(judged(()), path) == ["C16: agrees -> not measured"]


@pytest.mark.parametrize(
    ("text", "message"), [("[\n{,", ":2: "), ("[1]", "no ledger"), ("{}\n[]", ":2: ")]
)
def test_a_damaged_ledger_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / VERDICTS_FILE
    path.write_text(text)
    with pytest.raises(ClaimError, match=rf"verdicts.json.*{message}"):
        changes(judged(()), path)
    with pytest.raises(ClaimError, match="cannot read"):
        changes(judged(()), tmp_path / "absent")
