"""DroidSpeak: rebuild all shared rows in a few layers, chosen offline (arXiv 2411.02820).

The original shares caches between fine-tunes of one model; here the weights are the same and the
preceding context differs. The rows enter a block with the residual rows their source had there,
because the layers below were skipped. With equal weights those give back the source's own K and V
in the block's first layer (unless it is layer 0): a block of n layers refreshes n - 1 of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import ClassVar

from torch import Tensor

from baselines.selective import Reused, Selective, require_share
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Enter, Event, Leave, Wants
from kvcmas.errors import UserError

Block = tuple[int, int]


@dataclass(frozen=True)
class DroidSpeak(Selective):
    """Recompute every shared row in the layers of ``blocks``.

    Attributes:
        blocks: first and last layer of each block, ascending, with a gap between two blocks. The
            headline is one contiguous block from an offline profile; none at all is FullShared.
    """

    name: ClassVar[str] = "droidspeak"

    blocks: tuple[Block, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            blocks = tuple((index(first), index(last)) for first, last in self.blocks)
        except (TypeError, ValueError):
            raise UserError(f"blocks={self.blocks!r} is not a list of layer pairs") from None
        if any(not 0 <= first <= last for first, last in blocks) or any(
            after[0] <= before[1] + 1 for before, after in pairwise(blocks)
        ):
            raise UserError(
                f"blocks={blocks!r} must be ascending pairs (first, last) with a gap in between"
            )
        object.__setattr__(self, "blocks", blocks)

    @classmethod
    def for_rho(cls, rho: float, layers: int, choose: Callable[[int], Block]) -> DroidSpeak:
        """One block of the ``(1 - rho) layers`` nearest layers; ``choose(size)`` says which.

        Raises:
            UserError: a ``rho`` outside 0..1.
        """
        require_share("rho", rho)
        size = round((1 - rho) * layers)
        return cls(blocks=(choose(size),) if size else ())

    @property
    def wants(self) -> Wants:
        """Residual rows where a block starts; layer 0 has the embeddings."""
        return Wants(hidden_layers=tuple(first for first, _ in self.blocks if first))

    @property
    def reason(self) -> str:
        """See :class:`Selective`."""
        return "layer block" if self.blocks else ""

    @property
    def deepest(self) -> int:
        """See :class:`Selective`."""
        return self.blocks[-1][1]

    def schedule(self, reused: Reused) -> tuple[Event, ...]:
        """All rows enter at the start of each block and leave after its end."""
        events: list[Event] = []
        for first, last in self.blocks:
            events.append(Enter(first, reused.rows, reused.residual(first)))
            events.append(Leave(last + 1, reused.rows))
        return tuple(events)


def layer_errors(exact: SegmentCache, source: SegmentCache) -> Tensor:
    """Relative error of plain reuse per layer, ``[layers]``: the mean of K's and V's.

    Averaged over edges and requests this is the deviation that the offline criterion ranks.
    """
    errors = [
        (true.float() - used.float()).flatten(1).norm(dim=1) / true.float().flatten(1).norm(dim=1)
        for true, used in ((exact.k, source.k), (exact.v, source.v))
    ]
    return (errors[0] + errors[1]) / 2


def candidate_blocks(layers: int, size: int, *, first: int = 1, step: int = 1) -> list[Block]:
    """All blocks of ``size`` layers that start at ``first``, ``first + step``, ...

    Layer 0 is exact after alignment; ``first=0`` admits the block that executes from embeddings.
    With :func:`baselines.selective.search` over these a profile runs in a closed loop, which is the
    headline: what a block enters with is stale, so it does not remove the error that it covers.

    Raises:
        UserError: no block of that size fits.
    """
    if not 1 <= size <= layers:
        raise UserError(f"a block of {size} layers does not fit a model of {layers}")
    last_start = layers - size
    return [(a, a + size - 1) for a in range(min(first, last_start), last_start + 1, step)]


def choose_block(errors: Sequence[float], size: int, *, first: int = 1) -> Block:
    """Criterion mode: the block whose layers deviate most in total; ties go to the earliest."""
    blocks = candidate_blocks(len(errors), size, first=first)
    return max(blocks, key=lambda block: sum(errors[block[0] : block[1] + 1]))
