"""Run directories: written so that a crash costs one sample, read so that damage is named.

``run.json`` holds the :class:`RunInfo`; ``records.jsonl`` grows by one block per sample, its turns
first and its sample row last. A sample is complete when the newline after its sample row is on
disk. Whatever follows the last complete sample is the rest of an interrupted write: it does not
count. A finished run may be packed: ``records.jsonl.xz`` stands in place of the rows.
"""

from __future__ import annotations

import errno
import hashlib
import json
import lzma
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from results.errors import RecordError
from results.formula_record import FormulaRecord
from results.schema import (
    SCHEMA_VERSION,
    EdgeRecord,
    EntryCounts,
    ExecutedTurn,
    FidelityEdge,
    FidelityRecord,
    FirstToken,
    LostRequest,
    RequestRecord,
    RunInfo,
    SampleRecord,
    ServeInfo,
    TurnRecord,
)
from results.stream_record import StreamRecord

__all__ = [
    "SCHEMA_VERSION",
    "EdgeRecord",
    "EntryCounts",
    "ExecutedTurn",
    "FidelityEdge",
    "FidelityRecord",
    "FirstToken",
    "FormulaRecord",
    "LostRequest",
    "RequestRecord",
    "Row",
    "Run",
    "RunInfo",
    "RunWriter",
    "SampleRecord",
    "ServeInfo",
    "StreamRecord",
    "TurnRecord",
    "TurnRow",
    "normalised",
    "pack",
    "read_run",
    "read_runs",
    "run_key",
    "short_command",
]

RUN_FILE = "run.json"
ROWS_FILE = "records.jsonl"
PACKED_FILE = "records.jsonl.xz"
# Digits of a measured number that a packed run keeps.
PACKED_DIGITS = 7

TurnRow = TurnRecord | FidelityRecord | RequestRecord | LostRequest | StreamRecord | FormulaRecord
Row = TurnRow | SampleRecord
_ROW: TypeAdapter[Row] = TypeAdapter(Annotated[Row, Field(discriminator="kind")])

# What a repetition of the same run may change; everything else has to come out the same.
_VOLATILE = frozenset(
    {
        "ttft_s",
        "e2e_s",
        "times_s",
        "ttft_mean_s",
        "peak_memory_bytes",
        "peak",
        "arrival_s",
        "released_s",
        "started_s",
        "finished_s",
        "inter_token_s",
    }
)


@dataclass(frozen=True)
class Run:
    """One run as read from disk: complete samples only, in the order they were run."""

    info: RunInfo
    turns: tuple[TurnRecord, ...]
    samples: tuple[SampleRecord, ...]
    fidelity: tuple[FidelityRecord, ...] = ()
    """Turns replayed on a recorded trajectory."""
    requests: tuple[RequestRecord, ...] = ()
    """Requests answered under load."""
    lost: tuple[LostRequest, ...] = ()
    """Requests that were not."""
    streamed: tuple[StreamRecord, ...] = ()
    """Turns of a single stream."""
    formulas: tuple[FormulaRecord, ...] = ()
    """Numbers that were calculated."""
    directory: Path | None = None

    @property
    def name(self) -> str:
        """Where the run came from: its directory, else its key."""
        return str(self.directory) if self.directory is not None else self.info.run_key

    @property
    def out_of_memory(self) -> bool:
        """Whether the cell was refused for its memory: a result without samples."""
        cell = self.info.serve or self.info.stream
        return cell is not None and cell.out_of_memory


def run_key(mapping: Mapping[str, Any]) -> str:
    """Hash of everything that changes a result: 16 hex digits of the SHA-256 of canonical JSON.

    The order of keys does not matter; tuples count as lists. Raises RecordError for values that
    JSON cannot hold.
    """
    try:
        text = json.dumps(mapping, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"run key: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normalised(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows as JSON-like dicts without timings and peak memory: what a repetition must repeat."""
    return [row.model_dump(mode="json", exclude=set(_VOLATILE)) for row in rows]


class RunWriter:
    """Appends complete samples to a run directory, new or interrupted.

    Opening an interrupted run drops the remainder of a torn write, so that :meth:`completed` is the
    index of the next sample. Not meant for several processes on one directory: a foreign write is
    detected and refused, not merged.
    """

    def __init__(self, directory: Path, info: RunInfo) -> None:
        """Create ``directory`` with its run.json, or reopen the one this run began.

        Raises RecordError if the directory belongs to a run with another key, is damaged, or is not
        writable.
        """
        self._rows = directory / ROWS_FILE
        run_file = directory / RUN_FILE
        with _writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            if run_file.exists():
                _check_key(run_file, info)
            elif self._rows.exists():
                raise RecordError(
                    f"{self._rows} has no {RUN_FILE} beside it; use another output directory"
                )
            else:
                _replace(run_file, info.model_dump_json(indent=2).encode() + b"\n")
            if (directory / PACKED_FILE).exists():
                raise RecordError(f"{directory} is a packed run; use another output directory")
            # If the file cannot be written, fail now and not after computing the first sample.
            self._rows.open("ab").close()
        self._key = info.run_key
        self._ends = [block.end for block in _blocks(directory, self._key)]
        self.truncate_to(len(self._ends))

    def completed(self) -> int:
        """Number of complete samples on disk."""
        return len(self._ends)

    def append_sample(self, turns: Sequence[TurnRow], sample: SampleRecord) -> None:
        """Add one sample with all its turns in one write, on disk when this returns.

        Raises RecordError if a row belongs to another run or sample, if another process wrote to
        the file, or if the write fails; a failed write is taken back.
        """
        rows: list[Row] = [*turns, sample]
        for row in rows:
            _check_row(row, self._key, self.completed(), sample.sample_id, str(self._rows))
        rest = memoryview(b"".join(row.model_dump_json().encode() + b"\n" for row in rows))
        with _writing(self._rows), self._rows.open("ab", buffering=0) as file:
            start = file.tell()
            if start != _size(self._ends):
                raise RecordError(f"{self._rows} was changed by another process")
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(start)
                raise
            self._ends.append(file.tell())

    def truncate_to(self, n_samples: int) -> None:
        """Drop every row after the ``n_samples``-th complete sample, to match a checkpoint.

        The file is replaced atomically. Raises RecordError if fewer samples are complete.
        """
        if not 0 <= n_samples <= self.completed():
            raise RecordError(
                f"{self._rows} holds {self.completed()} complete samples, cannot keep {n_samples}"
            )
        kept = self._ends[:n_samples]
        present = _read(self._rows)
        if len(present) > _size(kept):
            _replace(self._rows, present[: _size(kept)])
        self._ends = kept


def read_run(directory: Path) -> Run:
    """Read one run directory.

    Raises RecordError, with file and line where there is one, if run.json is missing or a complete
    line is not a record of this run. An incomplete last sample is left out.
    """
    info = _read_info(directory / RUN_FILE)
    blocks = _blocks(directory, info.run_key)
    turns = [turn for block in blocks for turn in block.turns]
    return Run(
        info=info,
        turns=tuple(turn for turn in turns if isinstance(turn, TurnRecord)),
        samples=tuple(block.sample for block in blocks),
        fidelity=tuple(turn for turn in turns if isinstance(turn, FidelityRecord)),
        requests=tuple(turn for turn in turns if isinstance(turn, RequestRecord)),
        lost=tuple(turn for turn in turns if isinstance(turn, LostRequest)),
        streamed=tuple(turn for turn in turns if isinstance(turn, StreamRecord)),
        formulas=tuple(turn for turn in turns if isinstance(turn, FormulaRecord)),
        directory=directory,
    )


def pack(directory: Path, into: Path) -> None:
    """Write a small copy of a run, for committing: complete samples, xz, the same bytes each time.

    Measured numbers that are no whole ones keep ``PACKED_DIGITS`` significant digits, and absolute
    paths in the command their last part.

    Raises RecordError if the run cannot be read or its copy not written.
    """
    info = _read_info(directory / RUN_FILE)
    blocks = _blocks(directory, info.run_key)
    rows: list[Row] = [row for block in blocks for row in (*block.turns, block.sample)]
    lines = (json.dumps(_rounded(row.model_dump(mode="json"))) for row in rows)
    text = "".join(f"{line}\n" for line in lines)
    with _writing(into):
        into.mkdir(parents=True, exist_ok=True)
    info = info.model_copy(update={"command": short_command(info.command)})
    _replace(into / RUN_FILE, info.model_dump_json(indent=2).encode() + b"\n")
    _replace(into / PACKED_FILE, lzma.compress(text.encode(), preset=9))


def short_command(command: str) -> str:
    """A command line in which absolute paths are their last part."""
    words = (Path(w).name if w.startswith("/") else w for w in shlex.split(command))
    return shlex.join(words)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{PACKED_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def read_runs(root: Path) -> list[Run]:
    """Read every run at or below ``root``, ordered by path; raises as :func:`read_run` does."""
    if not root.is_dir():
        raise RecordError(f"{root} is not a directory")
    return [read_run(path.parent) for path in sorted(root.rglob(RUN_FILE))]


class _Block(NamedTuple):
    turns: tuple[TurnRow, ...]
    sample: SampleRecord
    end: int  # offset in bytes just past the newline of the sample row


def _size(ends: Sequence[int]) -> int:
    return ends[-1] if ends else 0


def _blocks(directory: Path, key: str) -> list[_Block]:
    path, content = _rows(directory)
    blocks: list[_Block] = []
    turns: list[TurnRow] = []
    end = 0
    # Only \n ends a row: model output may hold other separators. The last piece is torn or empty.
    lines = content.split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            row = _ROW.validate_json(line, strict=True)
        except ValidationError as error:
            raise RecordError(f"{where}: {_reason(error)}") from error
        _check_row(row, key, len(blocks), turns[0].sample_id if turns else row.sample_id, where)
        end += len(line) + 1
        if isinstance(row, SampleRecord):
            blocks.append(_Block(tuple(turns), row, end))
            turns = []
        else:
            turns.append(row)
    return blocks


def _rows(directory: Path) -> tuple[Path, bytes]:
    """The file that holds a run's rows, and what is in it; nothing if there is none yet."""
    path, packed = directory / ROWS_FILE, directory / PACKED_FILE
    if path.exists() or not packed.exists():
        return path, _read(path) if path.exists() else b""
    try:
        return packed, lzma.decompress(_read(packed))
    except (lzma.LZMAError, EOFError) as error:
        raise RecordError(f"{packed} is damaged: {error}") from error


def _check_row(row: Row, key: str, index: int, sample_id: str, where: str) -> None:
    if row.run_key != key:
        raise RecordError(f"{where}: row of run {row.run_key} among those of {key}")
    if (row.sample_index, row.sample_id) != (index, sample_id):
        raise RecordError(
            f"{where}: {row.kind} of sample {row.sample_index} ({row.sample_id}) "
            f"where sample {index} ({sample_id}) was expected"
        )


def _check_key(run_file: Path, info: RunInfo) -> None:
    present = _read_info(run_file)
    if present.run_key != info.run_key:
        raise RecordError(
            f"{run_file.parent} holds run {present.run_key} ({present.method} on {present.bench}), "
            f"not {info.run_key} ({info.method} on {info.bench}); use another output directory"
        )


def _read_info(path: Path) -> RunInfo:
    if not path.exists():
        raise RecordError(f"{path.parent} has no {RUN_FILE}")
    try:
        return RunInfo.model_validate_json(_read(path), strict=True)
    except ValidationError as error:
        raise RecordError(f"{path}: {_reason(error)}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from error


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join([*(str(part) for part in first["loc"]), first["msg"]])


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a crash, finds the old content or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with _writing(path):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RecordError(
                f"cannot write {path}: the disk is full; free some space and run the command again"
            ) from error
        raise RecordError(f"cannot write {path}: {error.strerror or error}") from error
