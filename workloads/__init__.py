"""Benchmarks: data, agents and prompts, scoring."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import fields
from typing import Any

from kvcmas.errors import UserError
from workloads.base import Workload

# Imported when asked for: a workload may bring slow imports.
_WORKLOADS = {"gsm8k": "workloads.gsm8k:GSM8K"}


def names() -> tuple[str, ...]:
    """Names of the benchmarks."""
    return tuple(_WORKLOADS)


def get(name: str, **options: Any) -> Workload:
    """The benchmark ``name``; ``options`` are its own settings.

    Raises:
        UserError: an unknown benchmark (with the nearest name), an unknown option or a bad value.
    """
    if name not in _WORKLOADS:
        near = difflib.get_close_matches(name, _WORKLOADS, n=1, cutoff=0.4)
        advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(_WORKLOADS)}"
        raise UserError(f"unknown bench {name!r}; {advice}")
    module, _, attribute = _WORKLOADS[name].partition(":")
    workload = getattr(importlib.import_module(module), attribute)
    known = [f.name for f in fields(workload) if f.init]
    if unknown := [option for option in options if option not in known]:
        raise UserError(f"{name} has no option {unknown[0]!r}; known: {', '.join(known)}")
    made: Workload = workload(**options)
    return made
