"""CacheBlend: rebuild the tokens whose cache deviates most in an early layer (arXiv 2405.16444)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from baselines.selective import Reused, Selective, require_share
from kvcmas.engine.contract import (
    Candidates,
    Enter,
    Event,
    Select,
    require_choice,
    require_count,
)
from kvcmas.errors import UserError


@dataclass(frozen=True)
class CacheBlend(Selective):
    """Execute all shared rows up to the check layer and the selected ones from there on.

    PF rows are always executed, never compete for the budget, and the mask is the true one: each
    selected row sees the keys before it, rebuilt or reused.

    Attributes:
        ratio: share of the shared rows that is rebuilt.
        check_layer: where the rows are selected, from 1 (layer 0 is exact after alignment).
        deviation: of the ``value`` (the paper's code) or the rotated ``key`` (a later port).
        write_back: at the check layer keep the fresh K and V of the ``selected`` rows, so that
            ``rho = 1 - ratio (layers - 1) / layers``, or of all (``full``, the paper's code).
        scope: the top rows of the whole ``prompt``, or of each ``segment``.
        gradual: select again in every later layer among the rows still there, with shares that
            fall linearly around ``ratio`` (described in the paper, in no public code).
    """

    name: ClassVar[str] = "cacheblend"

    ratio: float = 0.1
    check_layer: int = 1
    deviation: Literal["value", "key"] = "value"
    write_back: Literal["selected", "full"] = "selected"
    scope: Literal["prompt", "segment"] = "prompt"
    gradual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share("ratio", self.ratio)
        require_count("check_layer", self.check_layer, 1)
        require_choice("deviation", self.deviation, ("value", "key"))
        require_choice("write_back", self.write_back, ("selected", "full"))
        require_choice("scope", self.scope, ("prompt", "segment"))
        require_choice("gradual", self.gradual, (True, False))

    @classmethod
    def for_rho(
        cls, rho: float, layers: int, write_back: Literal["selected", "full"] = "selected"
    ) -> CacheBlend:
        """Selection in layer 1 with the budget of ``rho``.

        With ``selected`` that is the nominal ``ratio = 1 - rho`` of the literature; layer 0 counts
        as reused, so the realised rho is a little higher (see ``write_back``). With ``full`` the
        check layer is rebuilt in full and ``rho = 1 - (1 + ratio (layers - 2)) / layers``.

        Raises:
            UserError: a ``rho`` outside 0..1, or one that ``full`` cannot reach.
        """
        require_share("rho", rho)
        if write_back == "selected":
            return cls(ratio=1 - rho)
        ratio = ((1 - rho) * layers - 1) / max(1, layers - 2)
        if not 0 <= ratio <= 1:
            raise UserError(
                f"rho={rho} is out of reach for {layers} layers with one of them rebuilt in full"
            )
        return cls(ratio=ratio, write_back=write_back)

    @property
    def reason(self) -> str:
        """See :class:`Selective`."""
        return f"{self.deviation} deviation"

    @property
    def deepest(self) -> int:
        """See :class:`Selective`."""
        return self.check_layer

    def schedule(self, reused: Reused) -> tuple[Event, ...]:
        """All rows enter unwritten at layer 0; layers before the check are written in full."""
        rows, check = reused.rows, self.check_layer
        events: list[Event] = [Enter(0, rows, write=False)]
        if check > 1:
            events.append(Select(1, rows, lambda candidates: candidates.rows))
        shares = _shares(self.ratio, reused.layers - check) if self.gradual else [self.ratio]
        for layer, share in enumerate(shares, check):
            write_all = layer == check and self.write_back == "full"
            events.append(Select(layer, rows, self._chooser(reused, share), write_all))
        return tuple(events)

    def _chooser(self, reused: Reused, share: float) -> Callable[[Candidates], Tensor]:
        groups = [reused.rows]
        if self.scope == "segment":
            groups = [reused.rows[inside] for _, inside in reused.per_segment(reused.rows)]

        def choose(candidates: Candidates) -> Tensor:
            if self.deviation == "value":
                new, old = candidates.v_new, candidates.v_old
            else:
                new, old = candidates.k_new, candidates.k_old
            squared = (new.float() - old.float()).square().sum(dim=(0, 2)).cpu()
            kept = []
            for group in groups:
                inside = torch.isin(candidates.rows, group)
                count = min(round(share * len(group)), int(inside.sum()))
                kept.append(candidates.rows[inside][squared[inside].topk(count).indices])
            return torch.cat(kept)

        return choose


def _shares(mean: float, layers: int) -> list[float]:
    """Linearly falling shares around ``mean``: from 1.5 to 0.5 times it, less where that tops 1."""
    if layers == 1:
        return [mean]
    spread = min(mean / 2, 1 - mean)
    return [mean + spread * (1 - 2 * i / (layers - 1)) for i in range(layers)]
