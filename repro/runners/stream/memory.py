"""Bytes of a single stream: calculated before it runs, counted from its objects while it does."""

from __future__ import annotations

from dataclasses import replace

from kvcmas.engine.adapter import ModelSpec
from kvcmas.engine.cache import ContiguousBuffer
from kvcmas.engine.contract import Method, State
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.pool.anchors import BASE
from repro.runners import memory_model
from repro.runners.memory_model import PoolBytes, shapes_of
from results.stream_schema import MemoryBytes
from traces.schema import TraceWorkflow


def needed_bytes(method: Method, workflow: TraceWorkflow, spec: ModelSpec, weights: int) -> int:
    """All categories of :mod:`repro.runners.memory_model`, and what a PF policy stores."""
    dense = replace(method, pf_policy="dense")
    counted = memory_model.memory_bytes(dense, shapes_of(workflow), spec, weights)
    return counted.total + prefix_bytes(method, workflow, spec)


def prefix_bytes(method: Method, workflow: TraceWorkflow, spec: ModelSpec) -> int:
    """Store of agent-specific segments: K and V of each, and the factors of its delta."""
    if method.pf_policy == "dense":
        return 0
    total, width = 0, spec.kv_heads * spec.head_dim
    for turn in workflow.turns:
        for position, segment in enumerate(turn.segments):
            tokens = len(segment.ids)
            if segment.slot is not None or not tokens:
                continue
            total += tokens * spec.kv_bytes_per_token
            if method.pf_policy == "delta" and position > 0:
                rank = min(method.pf_rank, tokens, width)
                total += 2 * (spec.layers - 1) * rank * (tokens + width) * spec.dtype.itemsize
    return total


def held_bytes(
    weights: int, result: TurnResult, engine: Engine, transient: int | None
) -> MemoryBytes:
    """What there is after a turn, from the objects themselves.

    Raises:
        ValueError: the turn did not hand out its buffer.
    """
    if result.buffer is None:
        raise ValueError("memory is counted with the turn's buffer")
    pool = pool_bytes(engine.state())
    return MemoryBytes(
        weights=weights,
        active=_buffer_bytes(result.buffer),
        sources=result.source_bytes,
        pool_base=pool.base,
        pool_delta=pool.delta,
        references=result.reference_bytes,
        transient=transient,
    )


def pool_bytes(state: State) -> PoolBytes:
    """An engine's learned state by what it is for: to be matched by, or to be added."""
    base = 0
    for held in state.meta["method"].get("slots", {}).values():
        for anchor in held:
            for name, part in anchor["parts"].items():
                if name.split(":")[0] == BASE:
                    base += sum(t.nbytes for t in state.entries[f"m.{part['entry']}"].values())
    return PoolBytes(base, state.nbytes - base)


def _buffer_bytes(buffer: ContiguousBuffer) -> int:
    received = 0 if buffer.received is None else buffer.received.total.nbytes
    return buffer.nbytes + sum(h.nbytes for h in buffer.hidden.values()) + received
