"""Row schedules executed the slow way, with Transformers' own modules, from the words of DESIGN 4.

Rows are kept in dictionaries and every query attends by itself; nothing of the executor is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcmas.engine.cache import Origin
from kvcmas.engine.contract import Candidates, Enter, Leave, Plan, Select
from kvcmas.engine.segments import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Outcome:
    """Buffer ``[layers, kv_heads, rows, head_dim]``, last logits, and what was done."""

    k: Tensor
    v: Tensor
    logits: Tensor
    origin: Tensor
    touched: list[bool]
    row_layers: int


@torch.inference_mode()
def interpret(model: PreTrainedModel, prompt: Prompt, plan: Plan) -> Outcome:
    """Run ``plan``; the last row must be active in the last layer."""
    config, trunk, n = model.config, model.get_decoder(), len(prompt)
    shape = (config.num_hidden_layers, config.num_key_value_heads, n, config.head_dim)
    k, v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    origin = torch.zeros(shape[0], n, dtype=torch.uint8)
    touched, row_layers = [False] * n, 0
    embedded = trunk.embed_tokens(torch.tensor(prompt.ids))
    cos, sin = (t[0] for t in trunk.rotary_emb(embedded[None], torch.arange(n)[None]))

    def rotate(x: Tensor, at: list[int]) -> Tensor:
        """``x [heads, rows, head_dim]`` to positions ``at``."""
        return apply_rotary_pos_emb(x[None], x[None], cos[None, at], sin[None, at])[0][0]

    hidden: dict[int, Tensor] = {}
    writes: dict[int, bool] = {}
    for layer in range(shape[0]):
        module = trunk.layers[layer]
        attention = module.self_attn

        for fill in plan.fills:
            rows = list(prompt.rows(fill.segment))
            keys, values = fill.cache.k[layer].clone(), fill.cache.v[layer].clone()
            origin[layer, rows] = Origin.REUSED
            if fill.correction is not None and layer > 0:
                covered = fill.correction.rows
                fill.correction.apply(layer, keys[:, :covered], values[:, :covered])
                origin[layer, rows[:covered]] = Origin.CORRECTED
            k[layer][:, rows] = rotate(keys, [rows[0]] * len(rows))
            v[layer][:, rows] = values

        for event in plan.events:
            if isinstance(event, Leave) and event.layer == layer:
                for row in event.rows.tolist():
                    hidden.pop(row, None)
        for event in plan.events:
            if isinstance(event, Enter) and event.layer == layer:
                for i, row in enumerate(event.rows.tolist()):
                    assert row not in hidden
                    hidden[row] = embedded[row] if event.hidden is None else event.hidden[i]
                    writes[row] = event.write

        active = sorted(hidden)
        row_layers += len(active)
        normed = module.input_layernorm(torch.stack([hidden[row] for row in active]))
        heads = [
            projection(normed).view(len(active), -1, shape[3]).transpose(0, 1)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        q, new_k, new_v = rotate(heads[0], active), rotate(heads[1], active), heads[2]
        place = {row: i for i, row in enumerate(active)}
        scattered = {row for row in active if writes[row]}
        dropped: set[int] = set()
        for event in plan.events:
            if isinstance(event, Select) and event.layer == layer:
                rows = [row for row in event.rows.tolist() if row in place]
                at = [place[row] for row in rows]
                candidates = Candidates(
                    layer,
                    torch.tensor(rows, dtype=torch.long),
                    new_k[:, at],
                    new_v[:, at],
                    k[layer][:, rows],
                    v[layer][:, rows],
                )
                kept = set(event.choose(candidates).tolist())
                dropped |= set(rows) - kept
                scattered = (scattered - set(rows)) | kept
                writes |= dict.fromkeys(kept, True)
                if event.write_all:
                    scattered |= set(rows)
        for row in scattered:
            k[layer][:, row] = new_k[:, place[row]]
            v[layer][:, row] = new_v[:, place[row]]
            origin[layer, row] = Origin.EXECUTED

        groups = q.shape[0] // shape[1]
        for row in active:
            touched[row] = True
            seen_k = k[layer][:, : row + 1].repeat_interleave(groups, dim=0)
            seen_v = v[layer][:, : row + 1].repeat_interleave(groups, dim=0)
            scores = (seen_k @ q[:, place[row], :, None]).squeeze(2) * attention.scaling
            mixed = (scores.softmax(-1)[:, None] @ seen_v).flatten()
            stream = hidden[row] + attention.o_proj(mixed)
            hidden[row] = stream + module.mlp(module.post_attention_layernorm(stream))
        for row in dropped:
            del hidden[row]
    logits = model.get_output_embeddings()(trunk.norm(hidden[n - 1]))
    return Outcome(k, v, logits, origin, touched, row_layers)
