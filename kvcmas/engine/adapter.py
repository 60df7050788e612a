"""What the executor needs from a model, and the adapter for Transformers' Llama and Qwen2."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from kvcmas.engine.rope import Rope
from kvcmas.errors import UserError

# Model types whose layers the adapters know.
KNOWN = ("llama", "qwen2")
# One row's product is cut into this many blocks of output features.
BLOCKS = 8


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder-only language model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    max_positions: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, vocab: int, dtype: torch.dtype, device: torch.device
    ) -> ModelSpec:
        """Shape of a Transformers text configuration.

        Raises:
            UserError: an architecture whose layers do something the adapters do not know.
        """
        if config.model_type not in KNOWN:
            raise UserError(
                f"model type {config.model_type!r} is not supported; known: {', '.join(KNOWN)}"
            )
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UserError("sliding-window attention is not supported")
        return cls(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            hidden=config.hidden_size,
            ffn=config.intermediate_size,
            vocab=vocab,
            max_positions=config.max_position_embeddings,
            dtype=dtype,
            device=device,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def layer_flops(self, kv_rows: int, rows: int, attended: int) -> int:
        """Multiply-adds times two of one layer.

        ``kv_rows`` rows get K and V; ``rows`` of them go through attention, output projection and
        MLP and see ``attended`` (query, key) pairs in total.
        """
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        per_row = 4 * self.hidden * q_dim + 6 * self.hidden * self.ffn
        return 4 * self.hidden * kv_dim * kv_rows + per_row * rows + 4 * q_dim * attended


class ModelAdapter(Protocol):
    """A model's layer functions on ``[rows, hidden]``; q, k, v are ``[heads, rows, head_dim]``."""

    spec: ModelSpec
    rope: Rope

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings ``[rows, hidden]`` of ids ``[rows]``."""
        ...

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        """Normalised residual rows."""
        ...

    def project_kv(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Unrotated keys and values."""
        ...

    def project_q(self, layer: int, normed: Tensor) -> Tensor:
        """Unrotated queries."""
        ...

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual rows after output projection and MLP of ``attended [heads, rows, head_dim]``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits ``[rows, vocab]``."""
        ...


class TransformersAdapter:
    """Llama and Qwen2 of Transformers (also as the language trunk of LLaVA-OneVision).

    Works with the model's own modules and weights; nothing is patched. Runs on the model's
    device and dtype.

    Raises:
        UserError: an architecture whose layers do something this adapter does not know.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        embed: Any = model.get_input_embeddings()
        weight = embed.weight
        self.spec = ModelSpec.from_config(config, weight.shape[0], weight.dtype, weight.device)
        trunk = model.get_decoder()
        self.rope = Rope.from_config(config, weight.device)
        self._embed: nn.Module = embed
        self._layers: list[Any] = list(trunk.layers)
        self._norm: nn.Module = trunk.norm
        self._head: Any = model.get_output_embeddings()

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.spec.head_dim)).transpose(0, 1)

    def embed(self, ids: Tensor) -> Tensor:
        """See :class:`ModelAdapter`."""
        return self._embed(ids)

    def input_norm(self, layer: int, hidden: Tensor) -> Tensor:
        """See :class:`ModelAdapter`."""
        return self._layers[layer].input_layernorm(hidden)

    def project_kv(self, layer: int, normed: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`ModelAdapter`."""
        attention = self._layers[layer].self_attn
        k, v = linear(attention.k_proj, normed), linear(attention.v_proj, normed)
        return self._heads(k), self._heads(v)

    def project_q(self, layer: int, normed: Tensor) -> Tensor:
        """See :class:`ModelAdapter`."""
        return self._heads(linear(self._layers[layer].self_attn.q_proj, normed))

    def finish(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """See :class:`ModelAdapter`."""
        module = self._layers[layer]
        flat = attended.transpose(0, 1).flatten(1)
        hidden = hidden + linear(module.self_attn.o_proj, flat)
        mlp, normed = module.mlp, module.post_attention_layernorm(hidden)
        gated = mlp.act_fn(linear(mlp.gate_proj, normed)) * linear(mlp.up_proj, normed)
        return hidden + linear(mlp.down_proj, gated)

    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`ModelAdapter`."""
        return linear(self._head, self._norm(hidden))


def linear(module: nn.Linear, rows: Tensor) -> Tensor:
    """``module(rows)`` for ``rows [rows, in_features]``.

    Decoding is little but reading the weights, and on AMD's processors the matrix-vector kernel of
    MKL, behind ``nn.Linear``, does that in one thread (on Intel's in all). There a single fp32 row
    on the CPU goes through a batched product.
    """
    weight = module.weight
    ours = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    if len(rows) != 1 or type(module) is not nn.Linear or not (ours and on_amd()):
        return module(rows)
    features = module.out_features
    blocks = gcd(features, BLOCKS)
    # The stride of the transposed row is what selects the fast kernel; a plain column is slower.
    column = rows.expand(blocks, 1, -1).transpose(1, 2)
    product = torch.bmm(weight.view(blocks, features // blocks, -1), column).view(1, features)
    return product if module.bias is None else product + module.bias


@cache
def on_amd() -> bool:
    """Whether this machine's processor is AMD's, as far as Linux tells."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
