"""`repro reference`: everything in the folder of committed records that is made from them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvcmas.errors import UserError
from repro.commands.claims import REFERENCE


def reference(
    folder: Annotated[Path, typer.Argument(help="Folder of packed records.")] = REFERENCE,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing, fail if something is stale.")
    ] = False,
) -> None:
    """Make tables, figures, verdicts and the overview of a folder of records again."""
    texts = _texts(folder)
    stale = _stale(folder, texts)
    if check:
        if stale:
            raise UserError(f"not what the records say: {', '.join(stale)}; run: repro reference")
        typer.echo(f"{folder} is what its records say")
        return
    _write(folder, texts, stale)


def stale_files(folder: Path) -> list[str]:
    """Files below ``folder`` that are missing, left over, or not what its records say.

    Tables, verdicts and the overview are compared byte for byte. Figures are compared by the hash
    of the records they were drawn from, because their bytes depend on fonts.

    Raises:
        ResultsError: records that cannot be read or cannot share a table.
    """
    return _stale(folder, _texts(folder))


def _stale(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    there = [*folder.glob("tables/*"), folder / "README.md", folder / "verdicts.json"]
    present = {p.relative_to(folder).as_posix(): p.read_bytes() for p in there if p.is_file()}
    stale = [name for name, text in wanted.items() if present.get(name) != text.encode()]
    stale += [name for name in present if name not in wanted]
    return sorted(stale) + ([] if _figures_are_fresh(folder) else ["figures"])


def _texts(folder: Path) -> dict[str, str]:
    """Content of every text file, by its path in the folder."""
    from repro.commands.tables import make_tables, write_table
    from results.evidence import read_evidence
    from results.folders import folders_page
    from results.ledger import VERDICTS_FILE, as_text
    from results.verdicts import judged

    evidence = read_evidence(folder)
    texts = {
        "README.md": folders_page(evidence, folder),
        VERDICTS_FILE: as_text(judged(evidence.runs, evidence.analyses)),
    }
    with tempfile.TemporaryDirectory() as name:
        for table in make_tables(evidence).values():
            if table.frame.empty:
                continue
            for path in write_table(table, Path(name), ("csv", "md")):
                texts[f"tables/{path.name}"] = path.read_text(encoding="utf-8")
    return texts


def _figures_are_fresh(folder: Path) -> bool:
    from repro.commands.figures import INDEX_FILE
    from results.evidence import digest

    path = folder / "figures" / INDEX_FILE
    if not path.exists():
        return False
    index = json.loads(path.read_text(encoding="utf-8"))
    files = [path.parent / name for one in index["figures"].values() for name in one["files"]]
    return index["records"] == digest(folder) and all(file.exists() for file in files)


def _write(folder: Path, texts: Mapping[str, str], stale: list[str]) -> None:
    notes = Console(stderr=True)
    for name in stale:
        path = folder / name
        if name == "figures":
            _draw(folder, path)
        elif name in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[name], encoding="utf-8")
        else:
            path.unlink()
    notes.print(f"made again: {', '.join(stale)}" if stale else "nothing was stale")


def _draw(records: Path, into: Path) -> None:
    """Draw all figures and keep the PNG files of those that are not empty."""
    from repro.commands.figures import INDEX_FILE, draw_figures

    shutil.rmtree(into, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        draw_figures(records, Path(name))
        index = json.loads((Path(name) / INDEX_FILE).read_text(encoding="utf-8"))
        index["figures"] = {n: one for n, one in index["figures"].items() if not one["empty"]}
        for one in index["figures"].values():
            one["files"] = [file for file in one["files"] if file.endswith(".png")]
            for file in one["files"]:
                (into / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(name) / file, into / file)
    into.mkdir(parents=True, exist_ok=True)
    (into / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
