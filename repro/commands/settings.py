"""``--set key=value`` and the choice of a device."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from kvcmas.errors import UserError


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Values in YAML notation: ``tau=0.5``, ``chained=false``, ``rank_base=null``.

    Raises:
        UserError: no ``=``, or a value that is not YAML.
    """
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise UserError(f"--set takes key=value, not {pair!r}")
        try:
            parsed[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {pair!r}: the value cannot be read") from error
    return parsed


def choose_device(name: str) -> str:
    """``auto`` is CUDA where there is one, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def check_writable(directory: Path) -> None:
    """Make ``directory`` and see that files can be written there.

    Raises:
        UserError: they cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}") from error
