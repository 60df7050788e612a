"""Writes the page of `repro report`."""

from __future__ import annotations

from pathlib import Path

from kvcmas.errors import UserError
from repro.report.page import report_page
from results.evidence import read_evidence


def write_report(records: Path, path: Path) -> Path:
    """Write the page for all records below ``records``; returns its path.

    Raises:
        UserError: it cannot be written.
        ResultsError: records that cannot be read, or cannot share a table.
    """
    page = report_page(read_evidence(records), records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return path
