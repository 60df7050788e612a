"""Takes a pinned snapshot of a model from the Hugging Face hub or from its local cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvcmas.errors import UserError
from repro.models.cache import sha256_of
from repro.models.loading import quiet_transformers

if TYPE_CHECKING:
    from rich.console import Console

    from repro.models.entries import HubSource

# Leaves out copies of the weights in other formats, such as Llama's original/*.pth.
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_downloaded(source: HubSource) -> bool:
    """Whether the hub's cache holds the pinned snapshot; nothing is sent to the network."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repo_id, "config.json", revision=source.revision)
    return isinstance(found, str)


def fetch_snapshot(
    source: HubSource, by_hand: Path, *, console: Console | None, verify: bool
) -> Path:
    """Return the snapshot directory of ``source``, downloading what the hub's cache lacks.

    Args:
        source: Repository and commit.
        by_hand: Directory into which the user may copy the model instead, for the message.
        console: None hides the download's progress bars.
        verify: Compare every large file with the sha256 under which the hub's cache stores it.

    Raises:
        UserError: The hub cannot be reached, refuses, or a cached file is damaged.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    advice = f"or copy the model to {by_hand}"
    page = f"https://huggingface.co/{source.repo_id}"
    if console is not None and not is_downloaded(source):
        console.print(f"Asking the Hugging Face hub for {source.repo_id}")
    try:
        with quiet_transformers(keep_bars=console is not None):
            snapshot = snapshot_download(
                source.repo_id, revision=source.revision, allow_patterns=_PATTERNS
            )
    except GatedRepoError as error:
        raise UserError(
            f"{source.repo_id} is gated: accept its licence at {page} and run `hf auth login`, "
            f"{advice}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"{source.repo_id} is not in the hub's cache and the hub cannot be reached: "
            f"connect and unset HF_HUB_OFFLINE, {advice}"
        ) from error
    # The client lets exceptions of its HTTP library through, which is not the same in all of its
    # releases; whatever it is, the download has failed.
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"cannot download {source.repo_id}: {reason}; try again {advice}"
        ) from error
    if verify:
        _verify_blobs(Path(snapshot))
    return Path(snapshot)


def _verify_blobs(snapshot: Path) -> None:
    for path in sorted(snapshot.rglob("*")):
        blob = path.resolve()
        # Large files are stored under their sha256, small ones under a git hash.
        if blob.is_file() and _SHA256.fullmatch(blob.name) and sha256_of(blob) != blob.name:
            raise UserError(f"{path} does not match its sha256: delete {blob} and run again")
