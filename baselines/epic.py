"""EPIC (LegoLink): rebuild the first tokens of every shared segment (arXiv 2410.15332).

The start of a separately cached segment acts as an attention sink it should not be. A static rule
without profile, statistics or state: the cheap sanity row of the comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from baselines.selective import Reused, Selective, require_share
from kvcmas.engine.contract import Enter, Event, require_count
from kvcmas.errors import UserError


@dataclass(frozen=True)
class EPIC(Selective):
    """Recompute the first ``tokens`` rows of every held PH in all layers."""

    name: ClassVar[str] = "epic"

    tokens: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("tokens", self.tokens, 0)

    @classmethod
    def for_rho(cls, rho: float, lengths: Sequence[int]) -> EPIC:
        """The ``tokens`` that come nearest to ``rho`` on segments of these lengths.

        Raises:
            UserError: a ``rho`` outside 0..1, or no segment.
        """
        require_share("rho", rho)
        if not lengths:
            raise UserError("EPIC's budget depends on the segments' lengths, but there are none")
        rebuilt = (1 - rho) * sum(lengths)
        counts = range(max(lengths) + 1)
        return cls(tokens=min(counts, key=lambda k: abs(sum(min(k, s) for s in lengths) - rebuilt)))

    @property
    def reason(self) -> str:
        """See :class:`Selective`."""
        return "first tokens" if self.tokens else ""

    def schedule(self, reused: Reused) -> tuple[Event, ...]:
        """The first rows of each segment enter with their embeddings and stay."""
        heads = [
            reused.rows[inside][: self.tokens] for _, inside in reused.per_segment(reused.rows)
        ]
        return (Enter(0, torch.cat(heads)),)
