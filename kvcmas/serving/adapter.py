"""vLLM's own Llama and Qwen2 modules behind the executor's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig

from kvcmas.engine.adapter import ModelSpec
from kvcmas.engine.rope import Rope
from kvcmas.errors import UserError


class VllmRope(Rope):
    """Fresh rows are rotated by vLLM's module, so that they equal those of its own prefill."""

    def __init__(self, module: Any, plain: Rope) -> None:
        super().__init__(plain.inv_freq, plain.attention_scaling)
        self._module = module

    def make(self, x: Tensor, positions: Tensor) -> Tensor:
        """See :class:`Rope`."""
        # A copy: vLLM rotates in place.
        rows = x.transpose(0, 1).flatten(1).clone()
        rotated, _ = self._module(positions, rows)
        return rotated.unflatten(1, (x.shape[0], -1)).transpose(0, 1)


class VllmAdapter:
    """See :class:`~kvcmas.engine.adapter.ModelAdapter`. Nothing of the model is patched.

    Args:
        chunk: rows that go through an MLP at a time; vLLM has reserved memory for so many.

    Raises:
        UserError: an architecture or a parallel layout that is not supported.
    """

    def __init__(self, model: Any, config: VllmConfig, chunk: int) -> None:
        if config.parallel_config.world_size > 1:
            raise UserError("tensor and pipeline parallelism are not supported")
        # Not its text part: a model that wraps another one is not supported.
        shape, vocab = config.model_config.hf_config, config.model_config.get_vocab_size()
        weight = next(model.parameters())
        self.spec = ModelSpec.from_config(shape, vocab, weight.dtype, weight.device)
        trunk = model.model
        self._model = model
        self._embed = trunk.embed_input_ids
        self._layers: list[Any] = list(trunk.layers)
        self._norm = trunk.norm
        self._chunk = chunk
        first = self._layers[0].self_attn
        self.rope: Rope = VllmRope(first.rotary_emb, Rope.from_config(shape, weight.device))
        self._projected: tuple[Tensor, Tensor] | None = None

    @property
    def attention(self) -> list[Any]:
        """The attention modules by layer; each holds its cache and its backend."""
        return [layer.self_attn.attn for layer in self._layers]

    def embed(self, ids: Tensor) -> Tensor:
        """See :class:`~kvcmas.engine.adapter.ModelAdapter`."""
        return self._embed(ids)

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        """See :class:`~kvcmas.engine.adapter.ModelAdapter`."""
        return self._layers[layer].input_layernorm(hidden)

    def project_kv(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~kvcmas.engine.adapter.ModelAdapter`."""
        q, k, v = self._project(layer, normed)
        # One fused projection: the queries wait for the call that wants them, if they are wanted.
        self._projected = (normed, q)
        return k, v

    def project_q(self, layer: int, normed: Tensor) -> Tensor:
        """See :class:`~kvcmas.engine.adapter.ModelAdapter`."""
        waiting, self._projected = self._projected, None
        if waiting is not None and waiting[0] is normed:
            return waiting[1]
        return self._project(layer, normed)[0]

    def _project(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        joined, _ = self._layers[layer].self_attn.qkv_proj(normed)
        heads = joined.unflatten(1, (-1, spec.head_dim)).transpose(0, 1)
        q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads])
        return q, k, v

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """See :class:`~kvcmas.engine.adapter.ModelAdapter`."""
        module = self._layers[layer]
        rows = attended.transpose(0, 1).flatten(1)
        parts = []
        for part, flat in zip(hidden.split(self._chunk), rows.split(self._chunk), strict=True):
            summed = part + module.self_attn.o_proj(flat)[0]
            parts.append(summed + module.mlp(module.post_attention_layernorm(summed)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`~kvcmas.engine.adapter.ModelAdapter`."""
        return self._model.compute_logits(self._norm(hidden))
