"""A page that says what each folder of records holds and which commands made it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from results import render
from results.evidence import Evidence

_HEADINGS = ("Folder", "Kind", "Records", "Model", "Engine", "Hardware", "Made by")
_INTRODUCTION = """\
# Reference records

Packed runs and analyses, and what is made from them: tables (`tables/`), figures (`figures/`) and
the verdicts on the paper's claims (`verdicts.json`). Everything but the records is written by
`repro reference`; a test fails when it is not what the records say.
"""


@dataclass(frozen=True)
class _Record:
    kind: str
    model: str
    engine: str
    hardware: str
    command: str


def folders_page(evidence: Evidence, root: Path) -> str:
    """Markdown with one row per folder below ``root`` that holds runs or analyses."""
    found: dict[str, list[_Record]] = defaultdict(list)
    for run in evidence.runs:
        if run.directory is not None:
            info = run.info
            found[_name(run.directory.parent, root)].append(
                _Record(info.kind, info.model, info.engine, info.hardware, info.command)
            )
    for analysis in evidence.analyses:
        if analysis.path is not None:
            p = analysis.provenance
            device = p.get("device", "").partition("(")[2].removesuffix(")")
            found[_name(analysis.path.parent, root)].append(
                _Record(
                    f"analysis {analysis.name}",
                    p.get("model", "").partition("@")[0],
                    "transformers",
                    device,
                    p.get("command", ""),
                )
            )
    rows = [_row(folder, records) for folder, records in sorted(found.items())]
    return f"{_INTRODUCTION}\n{render.markdown('Folders', _HEADINGS, rows, ())}"


def _name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix()


def _row(folder: str, records: list[_Record]) -> list[str]:
    def values(name: str) -> str:
        return ", ".join(sorted({getattr(record, name) for record in records}))

    commands = "<br>".join(f"`{text}`" for text in sorted({record.command for record in records}))
    shared = [values(name) for name in ("model", "engine", "hardware")]
    return [folder, values("kind"), str(len(records)), *shared, commands]
