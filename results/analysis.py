"""Files of `repro analyze`: what one row says, and CSV that carries its own provenance.

A file starts with ``# key: value`` lines; ``Analysis.read`` gives them back. It may be packed with
xz, as ``ranks.csv.xz``.
"""

from __future__ import annotations

import csv
import io
import lzma
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

import pandas as pd

from results.errors import ResultsError
from results.records import run_key, short_command

# Retained ranks at which a reconstruction error is reported (Figure 7b).
RETAINED: Final = (1, 2, 4, 8, 16, 32, 64)
# Share of the squared singular values that the effective rank keeps (3.1).
ENERGY: Final = 0.9
# A segment cannot have a rank above its length: from here on the length bounds nothing at rank 32.
LONG: Final = 64

Kind = Literal["base", "delta", "pf_system", "pf_presence", "pf_bare", "pf_glue"]
KINDS: Final[Mapping[str, str]] = {
    "base": "source cache of an edge, keys canonical",
    "delta": "exact target minus aligned exact source, along the workflow",
    "pf_system": "segment right after the system prompt: that of one agent swapped for another's",
    "pf_presence": "segment right after the system prompt, minus its context-free reference",
    "pf_bare": "the same, but the reference has nothing before it: its first token is a sink",
    "pf_glue": "the glue right before the segment, there or removed, everything else equal",
}
Part = Literal["k", "v"]


class AnalysisError(ResultsError):
    """A file is no analysis, or not the one that is needed."""


class RankRow(NamedTuple):
    """Spectrum of one layer of one matrix ``[tokens, width]``.

    Attributes:
        source: what a delta starts from, a node or ``ref``; for a base the node that holds it.
        target: node under whose context the segment is; None for a base.
        pf_tokens: length of the PF that induces the delta; None for base and delta.
        relative_norm: Frobenius norm over that of the target cache; None for a base.
        effective_rank: least rank that keeps 90% of the energy; None in layer 0 of a delta, which
            is zero up to rounding.
        energy_r8: share of the energy that rank 8 keeps.
        error_r1: relative Frobenius error of the best approximation of rank 1, and so on.
    """

    request: str
    kind: Kind
    slot: str
    source: str
    target: str | None
    tensor: Part
    layer: int
    tokens: int
    width: int
    pf_tokens: int | None
    relative_norm: float | None
    effective_rank: int | None
    energy_r8: float | None
    error_r1: float | None
    error_r2: float | None
    error_r4: float | None
    error_r8: float | None
    error_r16: float | None
    error_r32: float | None
    error_r64: float | None


class ChainRow(NamedTuple):
    """Error of one layer of one served segment against the exact cache, over the latter's norm.

    Attributes:
        reference: what the segment was made from: ``source`` agent or ``context-free``.
        correction: ``kvcmas`` (accepted), or ``none`` for plain reuse.
        holder: node that held the segment before this turn; None if nobody did.
        action: what the method did with it.
        covered: tokens that a correction reached.
    """

    request: str
    reference: Literal["source", "context-free"]
    correction: Literal["kvcmas", "none"]
    node: str
    turn: int
    slot: str
    holder: str | None
    action: str
    tokens: int
    covered: int
    tensor: Part
    layer: int
    error: float


class CoverageRow(NamedTuple):
    """Reuse error of one turn before and after a subset of its cache was replaced by the exact one.

    Attributes:
        unit: what is selected: a ``layer`` of all tokens, or a ``token`` in all layers.
        criterion: ``layer``, ``deviation``, ``attention``, ``random`` or ``oracle``.
        tokens: shared tokens that somebody held before.
        selected: layers or tokens selected.
        budget: share of the (layer, token) entries that they are.
        energy: sum over tensors of the squared relative error; additive over entries.
        norm: sum over tensors of the relative error.
    """

    request: str
    node: str
    unit: Literal["layer", "token"]
    criterion: str
    rho: float
    tokens: int
    selected: int
    budget: float
    energy_before: float
    energy_after: float
    norm_before: float
    norm_after: float


ROWS: Final[Mapping[str, type[RankRow] | type[ChainRow] | type[CoverageRow]]] = {
    "ranks": RankRow,
    "chain": ChainRow,
    "coverage": CoverageRow,
}
"""What a row of each analysis holds."""
_TEXTS: Final = frozenset(
    (
        *("request", "kind", "slot", "source", "target", "tensor", "reference", "correction"),
        *("node", "holder", "action", "unit", "criterion"),
    )
)


@dataclass(frozen=True)
class Analysis:
    """Rows of one kind with where they come from.

    Attributes:
        name: ``ranks``, ``chain``, ``coverage``, or one of these with ``-summary``.
        provenance: model, trace, commit, command and so on; one line each.
        notes: definitions that a reader of the numbers needs.
        path: the file it was read from.
    """

    name: str
    frame: pd.DataFrame
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    path: Path | None = None

    @property
    def key(self) -> str:
        """Name of this analysis among records: a hash of its name and provenance, command apart."""
        told = {name: text for name, text in self.provenance.items() if name != "command"}
        return run_key({"analysis": self.name, **told})

    @classmethod
    def of(
        cls,
        name: str,
        row: type[RankRow] | type[ChainRow] | type[CoverageRow],
        rows: Iterable[RankRow | ChainRow | CoverageRow],
        provenance: Mapping[str, str],
        notes: Sequence[str] = (),
    ) -> Analysis:
        """Rows of the type ``row`` as a frame with its fields as columns."""
        return cls(name, pd.DataFrame(list(rows), columns=row._fields), provenance, notes)

    def derived(self, suffix: str, frame: pd.DataFrame, notes: Sequence[str] = ()) -> Analysis:
        """Something computed from this analysis, with the same provenance."""
        return Analysis(f"{self.name}-{suffix}", frame, self.provenance, (*self.notes, *notes))

    def write(self, directory: Path) -> Path:
        """Write ``{name}.csv``; returns its path.

        Raises:
            AnalysisError: it cannot be written.
        """
        path = directory / f"{self.name}.csv"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(self._text(), encoding="utf-8")
        except OSError as error:
            raise AnalysisError(f"cannot write {path}: {error.strerror}") from error
        return path

    def pack(self, directory: Path) -> Path:
        """Write ``{name}.csv.xz``, for committing; paths in the command keep their last part.

        Raises:
            AnalysisError: it cannot be written.
        """
        path = directory / f"{self.name}.csv.xz"
        short = {**self.provenance, "command": short_command(self.provenance.get("command", ""))}
        packed = replace(self, provenance=short)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lzma.compress(packed._text().encode(), preset=9))
        except OSError as error:
            raise AnalysisError(f"cannot write {path}: {error.strerror}") from error
        return path

    def _text(self) -> str:
        pairs = [
            ("analysis", self.name),
            *self.provenance.items(),
            *(("note", note) for note in self.notes),
        ]
        head = "".join(f"# {key}: {' '.join(value.split())}\n" for key, value in pairs)
        # Six digits: the last ones depend on the machine, and files are compared.
        return head + self.frame.to_csv(index=False, float_format="%.6g", lineterminator="\n")

    @classmethod
    def read(cls, path: Path, name: str) -> Analysis:
        """Inverse of :meth:`write` and :meth:`pack` up to rounding.

        Raises:
            AnalysisError: no such file, one that does not hold analysis ``name``, or a line in it
                that is no row of this analysis.
        """
        try:
            content = path.read_bytes()
            text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
        except OSError as error:
            raise AnalysisError(f"cannot read {path}: {error.strerror}") from error
        except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
            raise AnalysisError(f"{path} is damaged: {error}") from error
        lines = text.splitlines()
        head = [line for line in lines if line.startswith("# ")]
        pairs = [tuple(line[2:].partition(": ")[::2]) for line in head]
        if not pairs or pairs[0] != ("analysis", name):
            raise AnalysisError(f"{path} is no file of analysis {name!r}")
        if name in ROWS:
            _check_rows(lines, len(head), ROWS[name]._fields, path)
        return cls(
            name,
            pd.read_csv(io.StringIO(text), skiprows=len(head)),
            {key: value for key, value in pairs[1:] if key != "note"},
            tuple(value for key, value in pairs if key == "note"),
            path,
        )


def _check_rows(lines: Sequence[str], head: int, fields: Sequence[str], path: Path) -> None:
    """Raise AnalysisError with file and line for the first line that is no row of these fields."""
    for number, cells in enumerate(csv.reader(lines[head:]), start=head + 1):
        if number == head + 1:
            if tuple(cells) != tuple(fields):
                raise AnalysisError(f"{path}:{number}: the columns are not {', '.join(fields)}")
            continue
        if len(cells) != len(fields):
            raise AnalysisError(f"{path}:{number}: {len(cells)} cells, not {len(fields)}")
        for field_, cell in zip(fields, cells, strict=True):
            if cell and field_ not in _TEXTS and not _is_number(cell):
                raise AnalysisError(f"{path}:{number}: {field_}: {cell!r} is no number")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
