"""Counting what a turn executed and what it reused, from the executor's write mask only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcmas.engine.cache import Origin
from kvcmas.engine.segments import Prompt


@dataclass(frozen=True)
class Entries:
    """(layer, row) entries by origin. DESIGN section 5, rule 8: they add up to layers x rows."""

    reused: int
    corrected: int
    executed: int
    prefix_hit: int

    @property
    def total(self) -> int:
        """All entries."""
        return self.reused + self.corrected + self.executed + self.prefix_hit


@dataclass(frozen=True)
class Accounting:
    """What one turn's prefill cost.

    Attributes:
        prompt: entries of all prompt rows.
        shared: entries of each non-empty PH, by segment index; rho is counted from these.
        touched_rows: PH rows that went through any layer.
        row_layers: rows times layers through which they were executed, written or not.
        flops: of the model's execution (projections, attention, MLP, last-row logits).
        reference_tokens: tokens of context-free reference prefills charged to this turn.
    """

    layers: int
    prompt_tokens: int
    prompt: Entries
    shared: dict[int, Entries]
    touched_rows: int
    row_layers: int
    flops: int
    reference_tokens: int = 0


def count(origin: Tensor) -> Entries:
    """Entries by origin of ``origin [layers, rows]``.

    Raises:
        ValueError: an entry that nobody wrote.
    """
    by = torch.bincount(origin.flatten(), minlength=len(Origin)).tolist()
    if by[Origin.UNSET]:
        raise ValueError(f"{by[Origin.UNSET]} (layer, row) entries were never written")
    return Entries(
        reused=by[Origin.REUSED],
        corrected=by[Origin.CORRECTED],
        executed=by[Origin.EXECUTED],
        prefix_hit=by[Origin.PREFIX_HIT],
    )


def account(
    prompt: Prompt, origin: Tensor, touched: Tensor, row_layers: int, flops: int
) -> Accounting:
    """Accounting of a finished prefill; ``touched [rows]`` marks rows that went through any layer.

    Raises:
        ValueError: an entry that nobody wrote.
    """
    shared, touched_rows = {}, 0
    for index in prompt.shared():
        rows = prompt.rows(index)
        shared[index] = count(origin[:, rows.start : rows.stop])
        touched_rows += int(touched[rows.start : rows.stop].sum())
    return Accounting(
        layers=origin.shape[0],
        prompt_tokens=len(prompt),
        prompt=count(origin),
        shared=shared,
        touched_rows=touched_rows,
        row_layers=row_layers,
        flops=flops,
    )
