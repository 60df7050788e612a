"""Rotary position embedding: rotating cached keys from one absolute start to another.

Rotations compose, ``R(a) R(b) = R(a + b)``, so a cached key moves with one common angle for all
tokens of a segment. That holds for every RoPE type whose frequencies do not depend on the sequence
length; the others are refused. YaRN also scales cos and sin by a constant: it belongs to the key
once, so it is applied when a key is made and never when it is moved.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcmas.errors import UserError

FIXED_TYPES = ("default", "llama3", "linear", "yarn")


class Rope:
    """Half-split (Llama layout) rotary embedding with fixed frequencies.

    Angles are formed in fp64 and rotations done in fp32, so the error does not grow with the
    offset.

    Args:
        inv_freq: ``[head_dim / 2]`` inverse frequencies.
        attention_scaling: YaRN's attention factor; 1 otherwise.
    """

    def __init__(self, inv_freq: Tensor, attention_scaling: float = 1.0) -> None:
        self.inv_freq = inv_freq.double()
        self.attention_scaling = attention_scaling
        self._table = inv_freq.new_empty(2, 0, inv_freq.numel(), dtype=torch.float32)
        self._latest: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig, device: torch.device | str = "cpu") -> Rope:
        """Frequencies of a Transformers text configuration.

        Raises:
            UserError: a RoPE type whose frequencies depend on the length, or an unknown one.
        """
        parameters = config.rope_parameters
        kind = parameters.get("rope_type", "default")
        if kind not in FIXED_TYPES:
            raise UserError(
                f"RoPE type {kind!r} cannot be re-aligned; supported: {', '.join(FIXED_TYPES)}"
            )
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError("partial rotary embeddings cannot be re-aligned here")
        if kind == "default":
            # In fp32, as Transformers forms them: the frequencies are part of the model.
            exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
            return cls(1.0 / parameters["rope_theta"] ** exponent)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
        return cls(inv_freq, scaling)

    def make(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate fresh queries or keys ``[heads, tokens, head_dim]`` to ``positions [tokens]``.

        A tensor of positions must not be changed in place after it was given here.
        """
        # Every layer asks for the same rows, twice: the angles are kept for the latest tensor.
        if self._latest is None or self._latest[0] is not positions:
            self._latest = positions, self._lookup(positions) * self.attention_scaling
        return _rotate(x, *self._latest[1])

    def align_(self, keys: Tensor, offset: int) -> Tensor:
        """Move cached keys ``[..., tokens, head_dim]`` by ``offset`` positions, in place.

        ``offset = target start - source start``; canonical keys have start 0.
        """
        if offset:
            angle = offset * self.inv_freq
            cos, sin = angle.cos().float(), angle.sin().float()
            keys.copy_(_rotate(keys, cos, sin))
        return keys

    def align(self, keys: Tensor, offset: int) -> Tensor:
        """Like :meth:`align_`, into a new tensor, one entry of the first axis at a time.

        What is held besides the result stays small, and is quicker than page faults on more.
        """
        angle = offset * self.inv_freq
        cos, sin = angle.cos().float(), angle.sin().float()
        aligned = torch.empty_like(keys, memory_format=torch.contiguous_format)
        for source, target in zip(keys, aligned, strict=True):
            target.copy_(_rotate(source, cos, sin))
        return aligned

    def _lookup(self, positions: Tensor) -> Tensor:
        needed = int(positions.max()) + 1 if positions.numel() else 0
        if needed > self._table.shape[1]:
            length = max(needed, 2 * self._table.shape[1])
            steps = torch.arange(length, dtype=torch.float64, device=self.inv_freq.device)
            angle = torch.outer(steps, self.inv_freq)
            self._table = torch.stack((angle.cos(), angle.sin())).float()
        return self._table[:, positions]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
