"""Everything that tables, figures and claims are made from: run records and files of analyses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from results.analysis import ROWS, Analysis
from results.records import PACKED_FILE, ROWS_FILE, RUN_FILE, Run, read_runs, run_key

_PACKED: Final = ".csv.xz"


@dataclass(frozen=True)
class Evidence:
    """What was found below one folder, ordered by path."""

    runs: tuple[Run, ...] = ()
    analyses: tuple[Analysis, ...] = ()

    def analysed(self, name: str) -> list[Analysis]:
        """The analyses of one name: ``ranks``, ``chain`` or ``coverage``."""
        return [analysis for analysis in self.analyses if analysis.name == name]

    def where(self, key: str) -> Path | None:
        """Folder or file of the run or analysis with this key; None if it is not here."""
        places = {run.info.run_key: run.directory for run in self.runs}
        places |= {analysis.key: analysis.path for analysis in self.analyses}
        return places.get(key)


def read_evidence(root: Path) -> Evidence:
    """Read all runs and analyses below ``root``; nothing if it does not exist.

    A run that lies there twice, because two commands share it, counts once: the longer copy does,
    else the first by path.

    Raises RecordError or AnalysisError, with file and line where there is one, for damage.
    """
    if not root.is_dir():
        return Evidence()
    return Evidence(_distinct(read_runs(root)), tuple(read_analyses(root)))


def _distinct(runs: Sequence[Run]) -> tuple[Run, ...]:
    chosen: dict[str, Run] = {}
    for run in runs:
        other = chosen.get(run.info.run_key)
        if other is None or len(run.samples) > len(other.samples):
            chosen[run.info.run_key] = run
    return tuple(chosen.values())


def digest(root: Path) -> str:
    """Hash of all records below ``root``: which records something was made from.

    The hash is of the names and contents of their files, 16 hex digits.
    """
    names = {RUN_FILE, ROWS_FILE, PACKED_FILE, *_analysis_files()}
    files = sorted(path for path in root.rglob("*") if path.name in names)
    return run_key(
        {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    )


def read_analyses(root: Path) -> list[Analysis]:
    """Every file of `repro analyze` at or below ``root``, packed or not, ordered by path.

    Raises AnalysisError, with file and line where there is one, for damage.
    """
    names = _analysis_files()
    found = sorted(path for path in root.rglob("*.csv*") if path.name in names)
    return [Analysis.read(path, names[path.name]) for path in found]


def _analysis_files() -> dict[str, str]:
    """File name to name of the analysis, packed or not."""
    return {f"{name}{suffix}": name for name in ROWS for suffix in (".csv", _PACKED)}
