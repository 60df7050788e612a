"""Key/value storage: the buffer one turn attends over, and segment caches between turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor

from kvcmas.engine.attention import Rows, attend
from kvcmas.engine.received import Received
from kvcmas.engine.rope import Rope


class Origin(IntEnum):
    """Who wrote a (layer, row) entry of the buffer."""

    UNSET = 0
    REUSED = 1
    CORRECTED = 2
    EXECUTED = 3
    PREFIX_HIT = 4


@dataclass
class SegmentCache:
    """K and V of one segment, ``[layers, kv_heads, tokens, head_dim]``, keys canonical (start 0).

    Immutable by convention: corrections write into the target buffer only.

    Attributes:
        hidden: residual stream before a layer's input norm, ``{layer: [tokens, hidden]}``, where
            captured.
        received: attention that the tokens received in the turn that wrote them, summed over
            layers, heads and later queries, ``[tokens]`` fp32, where captured.
    """

    k: Tensor
    v: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    received: Tensor | None = None

    def __len__(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        received = 0 if self.received is None else self.received.nbytes
        return received + sum(t.nbytes for t in (self.k, self.v, *self.hidden.values()))

    def residual(self, layer: int) -> Tensor:
        """Captured rows before ``layer``, ``[tokens, hidden]``.

        Raises:
            ValueError: that layer was not captured.
        """
        if layer not in self.hidden:
            kept = ", ".join(map(str, sorted(self.hidden))) or "none"
            raise ValueError(f"no residual rows of layer {layer} were captured (layers: {kept})")
        return self.hidden[layer]


class Buffer(ABC):
    """The KV cache of one turn, wherever its rows lie; keys at their positions.

    Methods see no more than this; the executor works through it. Heads come first everywhere:
    ``[kv_heads, rows, head_dim]``.

    Attributes:
        capacity: rows that there is room for.
        length: rows filled so far (prompt, then decoded tokens).
        origin: ``[layers, prompt rows]`` uint8 :class:`Origin`, the write mask that accounting
            reads.
        hidden: captured residual rows, ``{layer: [capacity, hidden]}``.
        received: attention that rows received, where captured.
        rope: what moves keys to their positions.
    """

    def __init__(self, layers: int, rows: int, capacity: int, rope: Rope) -> None:
        self.capacity = capacity
        self.length = rows
        self.origin = torch.zeros(layers, rows, dtype=torch.uint8)
        self.hidden: dict[int, Tensor] = {}
        self.received: Received | None = None
        self.rope = rope
        self._extracted: dict[range, SegmentCache] = {}

    @abstractmethod
    def window(self, layer: int, rows: range) -> tuple[Tensor, Tensor]:
        """K and V of ``rows`` to write into; what they hold before is undefined."""

    @abstractmethod
    def commit(self, layer: int, rows: range, k: Tensor, v: Tensor) -> None:
        """Make what was written into a :meth:`window` the cache's content."""

    @abstractmethod
    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        """Scatter ``k, v`` into ``rows``."""

    @abstractmethod
    def read(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """K and V of ``rows``."""

    @abstractmethod
    def prefix(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of the rows before ``stop``, without a copy where the cache allows."""

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        """Attention of rotated queries ``[heads, rows, head_dim]`` over all keys up to theirs."""
        return attend(q, rows, *self.prefix(layer, int(rows.host[-1]) + 1))

    def exact(self, rows: int) -> bool:
        """Whether the first ``rows`` prompt rows hold no approximate entry (layer 0 never does)."""
        part = self.origin[1:, :rows]
        return not bool(((part == Origin.REUSED) | (part == Origin.CORRECTED)).any())

    def extract(self, rows: range) -> SegmentCache:
        """Copy ``rows`` out as a segment cache with canonical keys; copied once, then shared.

        Raises:
            ValueError: rows beyond those filled.
        """
        if rows.stop > self.length:
            raise ValueError(f"rows {rows} are not filled yet (length {self.length})")
        if rows not in self._extracted:
            part = slice(rows.start, rows.stop)
            k, v = self.gather(rows)
            self._extracted[rows] = SegmentCache(
                k=self.rope.align(k, -rows.start),
                v=v.clone(),
                hidden={layer: h[part].clone() for layer, h in self.hidden.items()},
                received=None if self.received is None else self.received.total[part].clone(),
            )
        return self._extracted[rows]

    @abstractmethod
    def gather(self, rows: range) -> tuple[Tensor, Tensor]:
        """K and V of ``rows`` in all layers, ``[layers, kv_heads, rows, head_dim]``."""


class ContiguousBuffer(Buffer):
    """Rows in two tensors of their own, ``k, v [layers, kv_heads, capacity, head_dim]``."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        rows: int,
        rope: Rope,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(shape[0], rows, shape[2], rope)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held by K and V."""
        return self.k.nbytes + self.v.nbytes

    def window(self, layer: int, rows: range) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`; here views, so that there is nothing to commit."""
        part = slice(rows.start, rows.stop)
        return self.k[layer, :, part], self.v[layer, :, part]

    def commit(self, layer: int, rows: range, k: Tensor, v: Tensor) -> None:
        """See :class:`Buffer`."""

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        """See :class:`Buffer`."""
        rows.scatter_(self.k[layer], k)
        rows.scatter_(self.v[layer], v)

    def read(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`."""
        return self.k[layer][:, rows.positions], self.v[layer][:, rows.positions]

    def prefix(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`."""
        return self.k[layer, :, :stop], self.v[layer, :, :stop]

    def gather(self, rows: range) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`; views."""
        part = slice(rows.start, rows.stop)
        return self.k[:, :, part], self.v[:, :, part]
