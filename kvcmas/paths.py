"""Where this project keeps what it downloads, builds or looks up."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The cache root: ``REPRO_CACHE``, else the platform's user cache directory."""
    chosen = os.environ.get("REPRO_CACHE") or platformdirs.user_cache_dir("kvcmas-repro")
    return Path(chosen).expanduser()
