"""Numbers in documents come from records: blocks of Markdown that are made again, never typed.

A document marks where a table of the registry, or one of its cells, belongs:

    <!-- table fidelity runs=gsm8k columns=method,rho_entry where="method=KVCMAS" -->
    <!-- end -->

    A ratio of <!-- value fidelity runs=gsm8k column=rho_entry where="method=KVCMAS" --><!-- end -->

    <!-- claims runs=. --><!-- end -->  (the ledger, one row per claim; rows=no: counts only)

    <!-- figure 4 folder=results/reference/figures --><!-- end -->

    <!-- bench kvcomm-1k --><!-- end -->

What stands between the marks is replaced. ``runs`` is a directory below the folder of records, or
``.`` for all of them; ``where`` keeps the rows whose displayed cells are these, ``column=text``
pairs joined by ``;``; ``footer=no`` leaves out a table's footer. A ``value`` has to be one cell.
Where rows come from several settings, the column that tells them apart is always shown. A
``figure`` is one in ``figures`` below the folder of records, which the document calls ``folder``; a
``bench`` is a file of ``repro bench --out`` in ``bench`` below it.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from results import render
from results.errors import ResultsError, TableError
from results.evidence import Evidence, read_evidence
from results.goals import read_bench
from results.tables import SETTING, Table, build_table
from results.verdicts import judged

_BLOCK = re.compile(
    r"(<!-- (?P<kind>table|value|claims|figure|bench) (?P<what>.*?) -->)(?P<old>.*?)(<!-- end -->)",
    re.S,
)
_OPTIONS = {
    "table": frozenset({"runs", "columns", "where", "footer"}),
    "value": frozenset({"runs", "column", "where"}),
    "claims": frozenset({"runs", "rows"}),
    "figure": frozenset({"folder"}),
    "bench": frozenset(),
}
_CLAIMS = ("Claim", "Statement", "Verdict", "Measured here")


def renew(text: str, records: Path, name: str) -> str:
    """``text`` of document ``name`` with every block made from the runs below ``records``.

    Raises:
        TableError: a mark that cannot be understood, or a value that is no single cell; names the
            document and the mark.
    """

    @cache
    def read(runs: str) -> Evidence:
        if not (records / runs).is_dir():
            raise ValueError(f"{records / runs} is not a directory")
        return read_evidence(records / runs)

    @cache
    def tables(number: str, runs: str) -> Table:
        evidence = read(runs)
        return build_table(number, evidence.runs, evidence.analyses)

    def made(match: re.Match[str]) -> str:
        try:
            kind, what = match["kind"], shlex.split(match["what"])
            if kind == "claims":
                options = _options(kind, what)
                body = _claims(read(options["runs"]), options.get("rows", "yes") == "yes")
            elif kind == "figure":
                body = _figure(what[0], _options(kind, what[1:])["folder"], records)
            elif kind == "bench":
                _options(kind, what[1:])
                body = _bench(what[0], records)
            else:
                body = _made(kind, what[0], _options(kind, what[1:]), tables)
        except (ResultsError, ValueError) as error:
            raise TableError(f"{name}: {match[1]}: {error}") from error
        return f"{match[1]}{body}{match[5]}"

    return _BLOCK.sub(made, text)


def _options(kind: str, pairs: Sequence[str]) -> dict[str, str]:
    options = dict(_pair(pair) for pair in pairs)
    if unknown := sorted(set(options) - _OPTIONS[kind]):
        raise ValueError(f"a {kind} has no option {', '.join(unknown)}")
    needed = {"runs", "column", "folder"} & _OPTIONS[kind]
    if missing := sorted(needed - set(options)):
        raise ValueError(f"a {kind} needs {', '.join(missing)}")
    return options


def _claims(evidence: Evidence, whole: bool) -> str:
    """How many claims have which verdict; the ledger, with the first number behind each verdict."""
    rows = judged(evidence.runs, evidence.analyses)
    cells = [
        [row.claim.id, row.claim.statement, row.verdict, *(map(str, row.measured[:1] or ("",)))]
        for row in rows
    ]
    counts = Counter(row.verdict for row in rows)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    if not whole:
        return f"\n{len(rows)} claims: {summary}.\n"
    return "\n" + render.markdown(f"Claims: {summary}", _CLAIMS, cells, ())


def _figure(number: str, folder: str, records: Path) -> str:
    """An image, or what is missing for it."""
    if (records / "figures" / f"figure{number}.png").exists():
        return f"\n![Figure {number}]({folder}/figure{number}.png)\n"
    return f"\nFigure {number} has no records yet.\n"


def _bench(name: str, records: Path) -> str:
    """A bench's rows beside their goals, or what is missing for them."""
    path = records / "bench" / f"{name}.json"
    if not path.exists():
        return f"\n{name} has no record yet.\n"
    return "\n" + read_bench(path).to_markdown()


def _made(
    kind: str, number: str, options: Mapping[str, str], tables: Callable[[str, str], Table]
) -> str:
    table = tables(number, options["runs"])
    if kind == "value":
        cells = _rows(table, [options["column"]], options)
        if len(cells) != 1 or not cells[0][0]:
            raise ValueError(f"{len(cells)} rows match, and one with a value is needed")
        return cells[0][0]
    names = options["columns"].split(",") if "columns" in options else None
    if names is not None and SETTING in table.columns:
        names = [SETTING.name, *(name for name in names if name != SETTING.name)]
    shown = [column.name for column in table.shown(names)]
    rows = _rows(table, shown, options)
    footer = table.footer if options.get("footer", "yes") == "yes" else ()
    caption = f"Table {table.spec.number}: {table.spec.title}"
    return "\n" + render.markdown(caption, table.headings(shown), rows, footer)


def _rows(table: Table, names: list[str], options: Mapping[str, str]) -> list[list[str]]:
    """Displayed cells of the columns ``names``, of the rows that ``where`` keeps."""
    wanted = dict(_pair(pair) for pair in options.get("where", "").split(";") if pair)
    keys = [column.name for column in table.shown(list(wanted))]
    tests, cells = table.display_rows(keys), table.display_rows(names)
    return [
        row
        for test, row in zip(tests, cells, strict=True)
        if dict(zip(keys, test, strict=True)) == wanted
    ]


def _pair(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise ValueError(f"{text!r} is not key=value")
    return key.strip(), value.strip()
