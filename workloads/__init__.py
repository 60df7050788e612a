"""Workloads by name: data, agents with their prompts, scoring."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvcmas.errors import UserError
from workloads.base import Workload

# Paths, so that asking for one workload does not import what the others need.
WORKLOADS: Mapping[str, str] = {
    "gsm8k": "workloads.gsm8k:GSM8K",
    "humaneval": "workloads.humaneval:HumanEval",
    "mmlu": "workloads.mmlu:MMLU",
    "mathvista": "workloads.mathvista:MathVista",
    "videomme": "workloads.videomme:VideoMME",
}


def get(name: str, **options: Any) -> Workload:
    """The workload ``name`` with its settings.

    Raises:
        UserError: an unknown name or setting (the nearest one is offered), or a value out of range.
    """
    if name not in WORKLOADS:
        raise UserError(f"unknown benchmark {name!r}; {_hint(name, list(WORKLOADS))}")
    module, _, attribute = WORKLOADS[name].partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    known = [field.name for field in fields(kind) if field.init]
    for option in options:
        if option not in known:
            raise UserError(f"{name} has no setting {option!r}; {_hint(option, known)}")
    workload: Workload = kind(**options)
    return workload


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
