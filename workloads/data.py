"""Reading benchmark rows from the hub or from files, with errors that name the place."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvcmas.errors import UserError
from workloads.base import Dataset, DataSource, Sample

Row = Mapping[str, Any]
S = TypeVar("S", bound=Sample)
MIX_SEED = 0
# Makes a sample of a row, given its number from 0. Raises ValueError for a row that makes none.
Parse = Callable[[int, Row], S]


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
        digest.update(
            json.dumps(asdict(sample), sort_keys=True, ensure_ascii=False).encode() + b"\n"
        )
    return Dataset(tuple(samples), source, label, digest.hexdigest())


def mixed(samples: Sequence[S]) -> list[S]:
    """The samples in an order drawn once, for files that go subject by subject.

    The first ones, which a short run evaluates or sets apart, are then of all subjects.
    """
    drawn = list(samples)
    random.Random(MIX_SEED).shuffle(drawn)
    return drawn


def read_hub(
    source: HubSource, split: str, parse: Parse[S], *, encoded: Sequence[str] = ()
) -> list[S]:
    """Samples made from the rows of ``split``, downloaded or from the hub's local cache.

    Images in the columns ``encoded`` arrive as ``{"bytes": ...}``, not decoded.

    Raises:
        UserError: the hub cannot be reached or lacks the dataset, or a row that ``parse`` refuses.
    """
    import datasets  # slow to import, and of no use to a run on local data

    try:
        rows = datasets.load_dataset(
            source.repo, source.config, split=split, revision=source.revision
        )
        for column in encoded:
            rows = rows.cast_column(column, datasets.Image(decode=False))
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"cannot load {source} from the hub ({reason}); "
            "give a directory with --data DIR or use --data procedural"
        ) from error
    return [parsed(parse, number, row, f"{source} row {number}") for number, row in enumerate(rows)]


def find_file(data: str | Path, bench: str, names: Sequence[str]) -> Path:
    """``data`` itself if it is a file, else the first of ``names`` in it or its folder ``bench``.

    Raises:
        UserError: nothing is there.
    """
    path = Path(data)
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"no such data file or directory: {path}")
    for folder in (path, path / bench):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise UserError(f"{path} has no {' or '.join(names)}")


def read_jsonl(path: Path, fields: Sequence[str], parse: Parse[S]) -> list[S]:
    """Samples made from the lines of a JSON-lines file (``.gz`` too) that has texts in ``fields``.

    Raises:
        UserError: an unreadable or empty file, or a line that is no such object or that ``parse``
            refuses with a ValueError; file and line are named.
    """
    samples: list[S] = []
    number = 0
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = _row(line, f"{path}:{number}", fields)
                    samples.append(parsed(parse, len(samples), row, f"{path}:{number}"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, EOFError) as error:
        raise UserError(f"{path}:{number + 1}: not UTF-8 text or cut short") from error
    if not samples:
        raise UserError(f"{path} has no lines")
    return samples


def parsed(parse: Parse[S], number: int, row: Row, place: str) -> S:
    """The sample of a row.

    Raises:
        UserError: ``parse`` refuses the row; ``place`` is named.
    """
    try:
        return parse(number, row)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error


def _row(line: str, place: str, fields: Sequence[str]) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(row, dict):
        raise UserError(
            f"{place}: an object with {', '.join(fields)} is expected, not {type(row).__name__}"
        )
    for field in fields:
        if field not in row:
            raise UserError(f"{place}: the field {field!r} is missing")
        if not isinstance(row[field], str) or not row[field].strip():
            raise UserError(f"{place}: the field {field!r} must be a text that is not empty")
    return row
