"""What the selective methods share: reuse every held PH, then let the model rebuild a part of it.

They differ in the part only (paper 2.2): whole layers (DroidSpeak), tokens (CacheBlend, EPIC) or
tokens within a range of layers (RelayCaching).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from kvcmas.engine.contract import (
    Decision,
    Event,
    Fill,
    Method,
    Plan,
    Sources,
    Turn,
    filled_rows,
)
from kvcmas.engine.segments import Prompt
from kvcmas.errors import UserError

Part = TypeVar("Part", bound=Hashable)


@dataclass(frozen=True)
class Reused:
    """The held PH of one prompt and the rows that may be rebuilt.

    The prompt's last row is executed anyway, so it is not among them; everything else of a held
    PH is.

    Attributes:
        rows: sorted absolute rows of all fills, ``[rows]``.
        layers: layers of the model.
    """

    prompt: Prompt
    fills: tuple[Fill, ...]
    rows: Tensor
    layers: int

    def per_segment(self, rows: Tensor) -> Iterator[tuple[Fill, Tensor]]:
        """Each fill with the ``[rows]`` booleans of those that lie in it, where any does."""
        for fill in self.fills:
            span = self.prompt.rows(fill.segment)
            inside = (rows >= span.start) & (rows < span.stop)
            if bool(inside.any()):
                yield fill, inside

    def residual(self, layer: int) -> Tensor | None:
        """Source residual rows of ``rows`` before ``layer``; None at 0 stands for embeddings."""
        if layer == 0:
            return None
        parts = []
        for fill, inside in self.per_segment(self.rows):
            parts.append(fill.cache.residual(layer)[: int(inside.sum())])
        return torch.cat(parts)


@dataclass(frozen=True)
class Selective(Method):
    """Aligned source rows on every held PH; PF and first-seen PH are dense (paper 4.1).

    With nothing to rebuild a selective method is FullShared, with everything it is NonShared.
    """

    @property
    @abstractmethod
    def reason(self) -> str:
        """What the rebuilt part is chosen by; empty if nothing ever is."""

    @property
    def deepest(self) -> int:
        """Highest layer that the settings name."""
        return 0

    @abstractmethod
    def schedule(self, reused: Reused) -> tuple[Event, ...]:
        """When the reused rows enter, are selected and leave."""

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Fill each held PH with its source cache and schedule the rebuilt part.

        Raises:
            UserError: settings that name a layer the model does not have.
        """
        fills, decisions = [], []
        for i in turn.prompt.shared():
            held = sources.held(i)
            if held is None:
                decisions.append(Decision(i, None, "dense", "first"))
                continue
            edge = turn.edge(i, held.node)
            if turn.force.get(i) is False:
                decisions.append(Decision(i, edge, "dense", "forced"))
                continue
            fills.append(Fill(i, held.cache))
            if self.reason:
                decisions.append(Decision(i, edge, "recompute", self.reason))
            else:
                decisions.append(Decision(i, edge, "reuse", "always"))
        events: tuple[Event, ...] = ()
        rows = filled_rows(turn.prompt, tuple(fills))
        if self.reason and len(rows):
            layers = len(fills[0].cache.k)
            if self.deepest >= layers:
                raise UserError(
                    f"{self.name}: layer {self.deepest} does not exist; the model's last layer"
                    f" is {layers - 1}"
                )
            events = self.schedule(Reused(turn.prompt, tuple(fills), rows, layers))
        return Plan.make(turn.prompt, tuple(fills), tuple(decisions), events)


def search(
    candidates: Iterable[Part], run: Callable[[Part], float]
) -> tuple[Part, dict[Part, float]]:
    """Offline profile in a closed loop: the candidate that leaves the least error when it is run.

    ``run`` serves calibration requests with a candidate (a block, a span) and returns the error
    that remains. Ties go to the first candidate. Also returns every candidate's error, for the
    record.

    Raises:
        ValueError: no candidate.
    """
    errors = {candidate: run(candidate) for candidate in candidates}
    return min(errors, key=errors.__getitem__), errors


def require_share(name: str, value: float) -> None:
    """Raise UserError unless ``value`` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{name}={value!r} must lie between 0 and 1")
