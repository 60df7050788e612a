"""A turn's KV cache in vLLM's pages: the buffer that executor and methods work on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvcmas.engine.attention import MAX_RUNS, Rows, attend
from kvcmas.engine.cache import Buffer
from kvcmas.engine.rope import Rope
from kvcmas.errors import UserError
from kvcmas.serving.layout import PagedRows, Placement


class PagedCache:
    """All layers' pages, their attention backend, and how to read single rows.

    Args:
        layers: vLLM's ``Attention`` modules in model order, caches allocated.
        rope: how cached keys move.
    """

    def __init__(self, layers: Sequence[Any], config: VllmConfig, rope: Rope) -> None:
        self.layers, self.rope = layers, rope
        cache: Tensor = layers[0].kv_cache
        self.block_size = cache.shape[2]
        self.device = cache.device
        if self.block_size != config.cache_config.block_size:
            raise UserError(
                f"the attention kernel works on blocks of {self.block_size}, the scheduler on"
                f" blocks of {config.cache_config.block_size}; set --block-size to the former"
            )
        spec = layers[0].get_kv_cache_spec(config)
        names = [layer.layer_name for layer in layers]
        # A builder of our own: the runner's keeps state of the step that is being prepared.
        with set_current_vllm_config(config):
            builder = layers[0].get_attn_backend().get_builder_cls()
            self._builder = builder(spec, names, config, self.device)
        placement = Placement.probe(layers[0])
        self.k = [PagedRows(layer.kv_cache, placement.k) for layer in layers]
        self.v = [PagedRows(layer.kv_cache, placement.v) for layer in layers]

    def metadata(self, blocks: Tensor, rows: Rows, slots: Tensor) -> Any:
        """Attention metadata of ``rows``: a contiguous run is a sequence, with the keys before it.

        The runs share the request's block table ``blocks [blocks]``. A run's queries stand at the
        end of its sequence, so that the causal mask lets each see exactly the keys up to its own.
        """
        starts = torch.tensor([0, *(high - low for low, high in rows.runs)]).cumsum(0).int()
        lengths = torch.tensor([high for _, high in rows.runs], dtype=torch.int32)
        table = blocks.int().expand(len(rows.runs), -1).contiguous()
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(rows.runs),
            num_actual_tokens=len(rows),
            max_query_len=int(starts.diff().max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            causal=True,
            positions=rows.positions,
        )
        return self._builder.build(0, common)


class PagedBuffer(Buffer):
    """See :class:`~kvcmas.engine.cache.Buffer`; the request's pages are read and written in place.

    Args:
        blocks: the request's block ids, ``[blocks]``.
        rows: prompt rows.

    Attributes:
        inject_seconds: spent on filling rows from caches so far (host time; on a GPU the launches).
    """

    def __init__(self, cache: PagedCache, blocks: Sequence[int], rows: int) -> None:
        capacity = len(blocks) * cache.block_size
        super().__init__(len(cache.layers), rows, capacity, cache.rope)
        self.inject_seconds = 0.0
        self._cache = cache
        self._blocks = torch.tensor(blocks, dtype=torch.long, device=cache.device)
        self._rows: Rows | None = None
        self._slots = self._blocks
        self._metadata: Any = None
        self._window_opened = 0.0

    def window(self, layer: int, rows: range) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`; here scratch."""
        self._window_opened = time.perf_counter()
        cache = self._cache.layers[layer].kv_cache
        shape = (cache.shape[1], len(rows), cache.shape[3] // 2)
        return cache.new_empty(shape), cache.new_empty(shape)

    def commit(self, layer: int, rows: range, k: Tensor, v: Tensor) -> None:
        """See :class:`Buffer`."""
        positions = torch.arange(rows.start, rows.stop, device=self._cache.device)
        self._update(layer, self._slot(positions), k, v)
        self.inject_seconds += time.perf_counter() - self._window_opened

    def write(self, layer: int, rows: Rows, k: Tensor, v: Tensor) -> None:
        """See :class:`Buffer`."""
        self._remember(rows)
        self._update(layer, self._slots, k, v)

    def read(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`."""
        size = self._cache.block_size
        blocks, at = self._blocks[rows.positions // size], rows.positions % size
        return self._cache.k[layer].scattered(blocks, at), self._cache.v[layer].scattered(
            blocks, at
        )

    def prefix(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`; a copy."""
        blocks = self._blocks[: -(-stop // self._cache.block_size)]
        k, v = self._cache.k[layer].whole(blocks), self._cache.v[layer].whole(blocks)
        return k[:, :stop], v[:, :stop]

    def gather(self, rows: range) -> tuple[Tensor, Tensor]:
        """See :class:`Buffer`; a copy."""
        size = self._cache.block_size
        first = rows.start // size
        blocks = self._blocks[first : -(-rows.stop // size)]
        part = slice(rows.start - first * size, rows.stop - first * size)
        k = [layer.whole(blocks)[:, part] for layer in self._cache.k]
        v = [layer.whole(blocks)[:, part] for layer in self._cache.v]
        return torch.stack(k), torch.stack(v)

    def attend(self, layer: int, q: Tensor, rows: Rows) -> Tensor:
        """See :class:`Buffer`: few runs go to the backend's kernel, scattered rows do not.

        A lone row would be a sequence that reads all keys before it again. Scattered rows share one
        masked attention over keys that are gathered once.
        """
        if len(rows.runs) > MAX_RUNS:
            return attend(q, rows, *self.prefix(layer, int(rows.host[-1]) + 1))
        self._remember(rows)
        if self._metadata is None:
            self._metadata = self._cache.metadata(self._blocks, rows, self._slots)
        module = self._cache.layers[layer]
        queries = q.transpose(0, 1).contiguous()
        out = torch.empty_like(queries)
        # Keys and values are in the cache; a decoder's kernel does not look at these arguments.
        module.impl.forward(
            module, queries, queries, queries, module.kv_cache, self._metadata, output=out
        )
        return out.transpose(0, 1)

    def _remember(self, rows: Rows) -> None:
        """Slots and metadata are made once for a set of rows, not once per layer."""
        if self._rows is not rows:
            self._rows, self._metadata = rows, None
            self._slots = self._slot(rows.positions)

    def _slot(self, positions: Tensor) -> Tensor:
        size = self._cache.block_size
        return self._blocks[positions // size] * size + positions % size

    def _update(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        module = self._cache.layers[layer]
        rows = (x.transpose(0, 1).contiguous() for x in (k, v))
        module.impl.do_kv_cache_update(module, *rows, module.kv_cache, slots)
