"""Bytes that a cell needs: weights, live caches and full pools, before anything is run.

Pools are counted as the methods store them, at capacity. With anything larger than the limit a cell
is out of memory; it is not run, because a machine that swaps or kills measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcmas.engine.adapter import ModelSpec
from kvcmas.engine.contract import Method
from kvcmas.errors import UserError
from repro.runners.serving.budgets import context_free
from traces.schema import TraceWorkflow

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Slot:
    """One shared slot of a workflow: its tokens, and the edges that anchors are made of.

    Attributes:
        chained: transitions from one holder to the next.
        first: readings from a context-free reference by the first turn of the workflow.
        later: those by later turns.
    """

    tokens: int
    chained: int
    first: int
    later: int


def slots(workflow: TraceWorkflow) -> dict[str, Slot]:
    """Shared slots of a workflow, by name."""
    found: dict[str, Slot] = {}
    outputs = {turn.node.out_slot for turn in workflow.turns}
    for position, turn in enumerate(workflow.turns):
        for segment in turn.segments:
            if segment.slot is None or not segment.ids:
                continue
            known = found.get(segment.slot)
            held = known is not None or segment.slot in outputs
            known = known or Slot(len(segment.ids), 0, 0, 0)
            found[segment.slot] = Slot(
                known.tokens,
                known.chained + held,
                known.first + (position == 0),
                known.later + (position > 0),
            )
    return found


def pool_bytes(method: Method, workflow: TraceWorkflow, spec: ModelSpec) -> int:
    """Bytes of a method's full pool for workflows of these lengths; 0 for one that keeps none."""
    settings = method.settings()
    total = 0
    for slot in slots(workflow).values():
        edges = slot.chained
        if context_free(method):
            edges = slot.later + (slot.first if settings["first_turn"] == "corrected" else 0)
        if not edges:
            continue
        if method.name == "kvcmas":
            total += _kvcmas(settings, slot.tokens, edges, spec)
        elif method.name == "kvcomm":
            anchors = settings["capacity"] + (settings["capacity_rule"] == "authors")
            layers = spec.layers + edges * (spec.layers - 1)
            total += anchors * layers * slot.tokens * _row_bytes(spec)
        elif method.name == "graphflow":
            # One mean per relation, in fp32 until it is finished, and a count per position.
            itemsize = max(4, spec.dtype.itemsize)
            row = _row_bytes(spec) // spec.dtype.itemsize * itemsize
            total += edges * slot.tokens * ((spec.layers - 1) * row + 8)
    return total


def live_bytes(workflow: TraceWorkflow, spec: ModelSpec) -> int:
    """One turn's buffer and the source caches (or references) of its workflow."""
    longest = max(len(turn.prompt) + len(turn.output) for turn in workflow.turns)
    shared = sum(slot.tokens for slot in slots(workflow).values())
    return (longest + shared) * spec.kv_bytes_per_token


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


def _row_bytes(spec: ModelSpec) -> int:
    """K and V of one token in one layer."""
    return 2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize


def _kvcmas(settings: Mapping[str, Any], tokens: int, edges: int, spec: ModelSpec) -> int:
    anchors = settings["capacity"] + (settings["capacity_rule"] == "authors")
    width = spec.kv_heads * spec.head_dim

    def pair(rank: int | None, layers: int) -> int:
        """Factors of K and of V: tokens x r and r x width, per layer."""
        effective = min(rank or width, tokens, width)
        return 2 * layers * effective * (tokens + width) * spec.dtype.itemsize

    bases = edges if settings["base"] == "per_edge" else 1
    base = pair(settings["rank_base"], spec.layers)
    delta = pair(settings["rank_delta"], spec.layers - 1)
    return anchors * (bases * base + edges * delta)
