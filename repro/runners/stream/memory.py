"""Bytes of a single stream: calculated before it runs, counted from its objects while it does."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Allocations(TorchDispatchMode):
    """Most bytes of storages made inside and alive at once; LAPACK's workspace does not show.

    Everything inside is slower: nothing is timed here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._tensors: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note the storages that it made."""
        outside = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage, size = _storage(tensor), tensor.untyped_storage().nbytes()
            if storage not in self._tensors:
                if storage in outside:
                    continue  # a view of what was there before
                self._tensors[storage] = 0
                self._live += size
            self._tensors[storage] += 1
            weakref.finalize(tensor, self._gone, storage, size)
        self.peak = max(self.peak, self._live)
        return result

    def made(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages behind ``tensors`` that were made inside and are alive."""
        found = {_storage(t): t.untyped_storage().nbytes() for t in tensors}
        return sum(size for storage, size in found.items() if storage in self._tensors)

    def _gone(self, storage: int, size: int) -> None:
        self._tensors[storage] -= 1
        if not self._tensors[storage]:
            del self._tensors[storage]
            self._live -= size


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
