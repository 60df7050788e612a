"""What the scheduler side tells the worker side in a step. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from kvcmas.serving.params import TurnParams


@dataclass(frozen=True)
class Begin:
    """A turn is scheduled: for the first time, or again after preemption.

    Attributes:
        key: vLLM's id of the request.
        ids: prompt ids.
        stop: rows ``0..stop-1`` are the plug-in's; vLLM executes the others. 0: vLLM executes all.
        blocks: the request's cache blocks now; they cover the rows before ``stop`` and one more.
    """

    key: str
    params: TurnParams
    ids: tuple[int, ...]
    stop: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """A turn has finished.

    Attributes:
        output: generated ids without the stop token.
        rows: rows of prompt and output whose K and V are in ``blocks``; the last sampled token of
            an output has none.
        held: whether the scheduler keeps the blocks until the worker reports the turn as done.
    """

    key: str
    output: tuple[int, ...]
    rows: int
    blocks: tuple[int, ...]
    held: bool


@dataclass(frozen=True)
class Drop:
    """A turn will never finish: it was aborted or failed."""

    key: str


@dataclass(frozen=True)
class StepWork:
    """Everything for one step, in the order in which it happened."""

    begins: tuple[Begin, ...] = ()
    ends: tuple[End | Drop, ...] = ()
