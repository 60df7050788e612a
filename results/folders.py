"""What each folder of records holds, which commands made it and what that took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from results import render
from results.evidence import Evidence
from results.records import Run

_HEADINGS: Final = (
    *("Folder", "Kind", "Records", "Model", "Engine", "Hardware", "Measured s", "Made by"),
)
_INTRODUCTION: Final = """\
# Reference records

Packed runs and analyses, and what is made from them: tables (`tables/`), figures (`figures/`) and
the verdicts on the paper's claims (`verdicts.json`). Everything but the records is written by
`repro reference`; a test fails when it is not what the records say.
"""
_NOTE: Final = "measured: seconds inside the records; loading models and calibrating come on top"


class _Record(NamedTuple):
    kind: str
    model: str
    engine: str
    hardware: str
    command: str
    seconds: float


@dataclass(frozen=True)
class Folder:
    """One folder that holds runs or analyses.

    Attributes:
        seconds: time inside its records; 0 where they hold none.
    """

    name: str
    kinds: tuple[str, ...]
    records: int
    models: tuple[str, ...]
    engines: tuple[str, ...]
    hardware: tuple[str, ...]
    commands: tuple[str, ...]
    seconds: float


def folders(evidence: Evidence, root: Path) -> list[Folder]:
    """All folders below ``root`` that hold records, by name."""
    found: dict[str, list[_Record]] = defaultdict(list)
    for run in evidence.runs:
        if run.directory is not None:
            info = run.info
            found[_name(run.directory.parent, root)].append(
                _Record(
                    *(info.kind, info.model, info.engine, info.hardware, info.command),
                    measured_seconds(run),
                )
            )
    for analysis in evidence.analyses:
        if analysis.path is not None:
            p = analysis.provenance
            device = p.get("device", "").partition("(")[2].removesuffix(")")
            model = p.get("model", "").partition("@")[0]
            found[_name(analysis.path.parent, root)].append(
                _Record(
                    *(f"analysis {analysis.name}", model, "transformers", device),
                    p.get("command", ""),
                    0.0,
                )
            )
    return [_folder(name, records) for name, records in sorted(found.items())]


def folders_page(evidence: Evidence, root: Path) -> str:
    """Markdown with one row per folder below ``root`` that holds runs or analyses."""
    rows = [
        [
            folder.name,
            ", ".join(folder.kinds),
            str(folder.records),
            *(", ".join(names) for names in (folder.models, folder.engines, folder.hardware)),
            f"{folder.seconds:.0f}" if folder.seconds else "",
            "<br>".join(f"`{command}`" for command in folder.commands),
        ]
        for folder in folders(evidence, root)
    ]
    return f"{_INTRODUCTION}\n{render.markdown('Folders', _HEADINGS, rows, (_NOTE,))}"


def measured_seconds(run: Run) -> float:
    """Time from the first request to the end of the last one, idle time of a load included.

    0 for a cell of a queue model: nothing was run.
    """
    if run.info.kind == "model":
        return 0.0
    if run.requests:
        return max(row.finished_s for row in run.requests)
    return sum(sample.e2e_s for sample in run.samples)


def _name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix()


def _folder(name: str, records: list[_Record]) -> Folder:
    def distinct(values: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(set(values)))

    return Folder(
        name,
        distinct(record.kind for record in records),
        len(records),
        distinct(record.model for record in records),
        distinct(record.engine for record in records),
        distinct(record.hardware for record in records),
        distinct(record.command for record in records),
        sum(record.seconds for record in records),
    )
