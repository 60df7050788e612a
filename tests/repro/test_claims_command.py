"""`repro claims`: shown, explained, written and checked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcmas.errors import UserError
from repro.cli import app
from repro.commands.claims_run import CHANGED
from tests.analyses import chain


@pytest.fixture
def records(tmp_path: Path) -> Path:
    chain(0.1, 0.3).write(tmp_path)
    return tmp_path


def claims(*arguments: str | Path):
    return CliRunner().invoke(app, ["claims", *map(str, arguments)])


def test_the_ledger_shows_verdicts_and_counts(records: Path) -> None:
    shown = claims("--runs", records)
    assert shown.exit_code == 0, shown.output
    assert "1 agrees, 36 not measured" in shown.output


def test_one_claim_is_traced_to_its_records(records: Path) -> None:
    shown = claims("C16", "--runs", records)
    assert f"record: {chain(0.1, 0.3).key} {records / 'chain.csv'}" in shown.output
    assert "verdict: agrees" in shown.output and "command: repro analyze chain" in shown.output
    assert isinstance(claims("C99", "--runs", records).exception, UserError)


def test_a_changed_verdict_ends_with_another_code(records: Path) -> None:
    assert claims("--write", "--reference", records).exit_code == 0
    assert claims("--check", "--reference", records).exit_code == 0
    chain(0.3, 0.1).write(records)
    changed = claims("--check", "--reference", records)
    assert changed.exit_code == CHANGED
    assert "C16: agrees -> disagrees" in changed.output
    again = claims("--write", "--reference", records)
    assert "C16: agrees -> disagrees" in again.output
    assert claims("--check", "--reference", records).exit_code == 0
