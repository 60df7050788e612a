"""The on-disk cache of built models: paths, manifests, and building a directory atomically.

A built model is a directory with a ``manifest.json`` that names every file with its size and
sha256. The directory appears under its final name in one rename, after everything is on disk, so
a process that dies half way leaves only a scratch directory, which the next build removes.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from kvcmas.errors import UserError
from kvcmas.paths import cache_dir as cache_dir

MANIFEST = "manifest.json"

# Raise this when the way models are built changes, so that older builds are redone.
_BUILD_FORMAT = 1
_RECORDED_PACKAGES = ("transformers", "tokenizers", "safetensors", "torch", "gguf")


def local_dir(name: str) -> Path:
    """Return where a user may put a ready Transformers directory for registry entry ``name``."""
    return cache_dir() / "local" / name


def built_dir(name: str) -> Path:
    """Return where the converted or generated model of entry ``name`` is kept."""
    return cache_dir() / "models" / name


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and sha256 hex digest of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a built directory must contain, and what it was built from.

    Attributes:
        build_format: Version of this package's way of building.
        recipe: The source's recipe; another recipe is another model.
        files: Every file but the manifest, by POSIX path relative to the directory.
        versions: Versions of the packages that wrote the files.
    """

    build_format: int
    recipe: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    @property
    def revision(self) -> str:
        """Sixteen hex digits that identify the content of all files."""
        lines = "".join(f"{name} {self.files[name].sha256}\n" for name in sorted(self.files))
        return hashlib.sha256(lines.encode()).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    """Return the sha256 hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a built directory, or None if it is missing or malformed."""
    try:
        raw = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        return Manifest(raw["build_format"], raw["recipe"], files, raw["versions"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_problem(directory: Path, recipe: Mapping[str, Any], *, verify: bool) -> str | None:
    """Say in a few words why a built directory cannot be used, or return None if it can.

    Sizes are always compared, digests only with ``verify``.
    """
    if not directory.is_dir():
        return "not built yet"
    manifest = read_manifest(directory)
    if manifest is None:
        return f"{MANIFEST} is missing or malformed"
    if (manifest.build_format, manifest.recipe) != (_BUILD_FORMAT, recipe):
        return "built from another source or by another version"
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != record.size:
            return f"{name} has the wrong size"
        if verify and sha256_of(path) != record.sha256:
            return f"{name} does not match its sha256"
    return None


def build(
    name: str,
    recipe: Mapping[str, Any],
    write: Callable[[Path, Path], None],
    *,
    needed_bytes: int,
    console: Console | None = None,
    verify: bool = False,
) -> Path:
    """Return the built directory of ``name``, building it unless an intact one is there.

    Args:
        name: Registry name.
        recipe: What the directory must have been built from.
        write: Called with an empty output directory and an empty work directory; fills the first.
        needed_bytes: Disk space without which a build is not even started.
        console: Told why a build happens; None keeps silent.
        verify: Compare digests of an existing build, not only sizes.

    Raises:
        UserError: The disk is full, the cache cannot be written, or ``write`` raised it.
    """
    final = built_dir(name)
    if find_problem(final, recipe, verify=verify) is None:
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(final, console):
            problem = find_problem(final, recipe, verify=verify)
            if problem is not None:  # else another process has just built it
                if final.exists() and console is not None:
                    console.print(f"{name}: {problem}; building it again")
                _build_locked(final, recipe, write, needed_bytes)
    except OSError as error:
        reason = (error.strerror or str(error)).splitlines()[0]
        raise UserError(
            f"cannot build model '{name}' in {final.parent}: {reason}; "
            "REPRO_CACHE chooses another directory"
        ) from error
    return final


def _build_locked(
    final: Path, recipe: Mapping[str, Any], write: Callable[[Path, Path], None], needed_bytes: int
) -> None:
    # We hold the lock, so whatever scratch directory is left belongs to a process that died.
    scratch_prefix = f".{final.name}.tmp-"
    for leftover in final.parent.glob(f"{scratch_prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(final.parent).free
    if free < needed_bytes:
        raise OSError(f"{needed_bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
    with tempfile.TemporaryDirectory(
        prefix=scratch_prefix, dir=final.parent, ignore_cleanup_errors=True
    ) as scratch:
        output, work = Path(scratch, "model"), Path(scratch, "work")
        output.mkdir()
        work.mkdir()
        write(output, work)
        _write_manifest(output, recipe)
        if final.exists():
            final.rename(Path(scratch, "previous"))
        output.rename(final)
        _sync(final.parent)


def _write_manifest(directory: Path, recipe: Mapping[str, Any]) -> None:
    files = {}
    for path in sorted(item for item in directory.rglob("*") if item.is_file()):
        files[path.relative_to(directory).as_posix()] = asdict(
            FileRecord(path.stat().st_size, sha256_of(path))
        )
        _sync(path)
    manifest = directory / MANIFEST
    versions = {package: version(package) for package in _RECORDED_PACKAGES}
    content = {
        "build_format": _BUILD_FORMAT,
        "recipe": recipe,
        "versions": versions,
        "files": files,
    }
    manifest.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(manifest)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _only_builder(final: Path, console: Console | None) -> Iterator[None]:
    lock = FileLock(final.with_name(f".{final.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if console is not None:
            console.print(f"{final.name}: waiting for another process that is building it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
