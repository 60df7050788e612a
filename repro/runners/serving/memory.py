"""Bytes that a cell needs: weights, live caches and full pools, before anything is run.

Pools are counted as the methods store them, at capacity. With anything larger than the limit a cell
is out of memory; it is not run, because a machine that swaps or kills measures nothing.
"""

from __future__ import annotations

from kvcmas.engine.adapter import ModelSpec
from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from repro.runners import memory_model
from repro.runners.memory_model import shapes_of, slots
from traces.schema import TraceWorkflow

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def pool_bytes(method: Method, workflow: TraceWorkflow, spec: ModelSpec) -> int:
    """Bytes of a method's full pool for workflows of these lengths; 0 for one that keeps none."""
    return memory_model.pool_bytes(method, shapes_of(workflow), spec).total


def live_bytes(workflow: TraceWorkflow, spec: ModelSpec) -> int:
    """One turn's buffer and the source caches (or references) of its workflow."""
    turns = shapes_of(workflow)
    shared = sum(slot.tokens for slot in slots(turns).values())
    return (max(turn.rows for turn in turns) + shared) * spec.kv_bytes_per_token


def needed_bytes(method: Method, workflow: TraceWorkflow, spec: ModelSpec, weights: int) -> int:
    """Estimate of a cell's peak."""
    pool = pool_bytes(method, workflow, spec)
    return weights + live_bytes(workflow, spec) + pool


def parse_bytes(text: str) -> int:
    """``80GB`` (10^9), ``16GiB`` (2^30) or plain bytes.

    Raises:
        UserError: neither of them.
    """
    number = text.strip().lower().rstrip("bikmg")
    unit = text.strip().lower()[len(number) :]
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit not in _UNITS or value <= 0:
        raise UserError(f"{text!r} is no amount of memory; write 80GB, 16GiB or a number of bytes")
    return int(value * _UNITS[unit])
