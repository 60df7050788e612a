"""Reading benchmark rows from the hub or from files, with errors that name the place."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcmas.errors import UserError
from workloads.base import Dataset, DataSource, Sample

Row = Mapping[str, Any]


@dataclass(frozen=True)
class HubSource:
    """A dataset on the Hugging Face hub, pinned to a commit."""

    repo: str
    config: str | None
    revision: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision[:12]}"


def dataset(samples: Sequence[Sample], source: DataSource, label: str) -> Dataset:
    """``samples`` with their provenance and hash (canonical JSON lines, in order)."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(asdict(sample), sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return Dataset(tuple(samples), source, label, digest.hexdigest())


def hub_rows(source: HubSource, split: str) -> list[Row]:
    """Rows of ``split``, downloaded or from the hub's local cache.

    Raises:
        UserError: the hub cannot be reached, or does not have the dataset.
    """
    import datasets  # slow to import, and of no use to a run on local data

    try:
        rows = datasets.load_dataset(source.repo, source.config, split=split, revision=source.revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot load {source} from the hub ({reason}); "
            "give a directory with --data DIR or use --data procedural"
        ) from error
    return list(rows)


def find_file(data: str | Path, names: Sequence[str]) -> Path:
    """``data`` itself if it is a file, else the first of ``names`` in that directory.

    Raises:
        UserError: nothing is there.
    """
    path = Path(data)
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"no such data file or directory: {path}")
    for name in names:
        if (path / name).is_file():
            return path / name
    raise UserError(f"{path} has no {' or '.join(names)}")


def jsonl_rows(path: Path, fields: Sequence[str]) -> Iterator[Row]:
    """Objects of a JSON-lines file (``.gz`` too) whose ``fields`` are all texts with something in them.

    Raises:
        UserError: an unreadable file, or a line that is no such object; file and line are named.
    """
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(line, f"{path}:{number}", fields)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, EOFError) as error:
        raise UserError(f"{path}:{number + 1}: not UTF-8 text or cut short") from error


def _row(line: str, place: str, fields: Sequence[str]) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: an object with {', '.join(fields)} is expected, not {type(row).__name__}")
    for field in fields:
        if field not in row:
            raise UserError(f"{place}: the field {field!r} is missing")
        if not isinstance(row[field], str) or not row[field].strip():
            raise UserError(f"{place}: the field {field!r} must be a text that is not empty")
    return row
