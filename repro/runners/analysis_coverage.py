"""`repro analyze coverage`: how much reuse error selected parts of a cache hold (Table 2, A.1).

Nothing is executed for a selection: the selected entries are replaced by exact ones, so that the
criterion is judged alone and not what recomputation makes of it. Tokens are selected among all
shared tokens of a turn that somebody held before, in all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from baselines.droidspeak import layer_errors
from kvcmas.engine.executor import Executor
from kvcmas.errors import UserError
from repro.runners.analysis import ExactSegment, ExactTurn, exact_turns
from results.analysis import CoverageRow
from traces.schema import TraceWorkflow

Unit = Literal["layer", "token"]


@dataclass(frozen=True)
class ReuseError:
    """Error of plain reuse of one turn's held segments, one step from exact sources.

    Attributes:
        energy: squared relative error of each entry, ``[2, layers, tokens]`` (K, V), fp64: squared
            difference over the squared norm of the segment's target tensor in that layer.
        segment: which held segment each token belongs to, ``[tokens]``.
        deviation: squared difference of the values in layer 1 (CacheBlend), ``[tokens]``.
        attention: received in the source turn, over the segment's mean (RelayCaching),
            ``[tokens]``.
    """

    energy: Tensor
    segment: Tensor
    deviation: Tensor
    attention: Tensor

    @classmethod
    def of(cls, turn: ExactTurn) -> ReuseError | None:
        """The error of a turn whose sources know the attention they received; None without any."""
        held = [segment for segment in turn.segments if segment.source is not None]
        if not held:
            return None
        parts = [_segment_error(segment) for segment in held]
        return cls(
            torch.cat([energy for energy, _, _ in parts], dim=-1),
            torch.cat([torch.full((len(s.cache),), i) for i, s in enumerate(held)]),
            torch.cat([deviation for _, deviation, _ in parts]),
            torch.cat([attention for _, _, attention in parts]),
        )

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.energy.shape[1]

    @property
    def tokens(self) -> int:
        """Held tokens of the turn."""
        return self.energy.shape[2]

    def total(self, left: Tensor | None = None) -> tuple[float, float]:
        """Energy and norm (:class:`~results.analysis.CoverageRow`) of the entries ``left``.

        ``left`` broadcasts to ``[layers, tokens]``; None is all of them.
        """
        energy = self.energy if left is None else self.energy * left.to(self.energy.device)
        tensors = energy.new_zeros(2, self.layers, int(self.segment.max()) + 1)
        tensors.index_add_(2, self.segment.to(energy.device), energy)
        return float(energy.sum()), float(tensors.sqrt().sum())


def _segment_error(segment: ExactSegment) -> tuple[Tensor, Tensor, Tensor]:
    source = segment.source
    if source is None or source.received is None:
        raise ValueError("a reuse error needs a source with the attention it received")
    energies = []
    for target, reused in ((segment.cache.k, source.k), (segment.cache.v, source.v)):
        # Layer by layer: fp64 copies of a whole long cache would need several times its memory.
        layers = [
            _squared(t, r) / t.double().square().sum() for t, r in zip(target, reused, strict=True)
        ]
        energies.append(torch.stack(layers))
    value = _squared(segment.cache.v[1], source.v[1])
    received = source.received.double()
    # Tokens at the end of a segment may have been read by nobody.
    relative = received / received.mean().clamp_min(torch.finfo(received.dtype).tiny)
    return torch.stack(energies), value, relative


def _squared(target: Tensor, reused: Tensor) -> Tensor:
    """Squared difference per token of one layer ``[kv_heads, tokens, head_dim]``, fp64."""
    return (target.double() - reused.double()).square().sum(dim=(0, 2))


class Coverage:
    """Selection criteria at given reuse ratios.

    Args:
        deviation: mean reuse error per layer on calibration requests, ``[layers]``
            (:func:`mean_deviation`).
        rhos: reuse ratios; the budget is what is left to 1.
        draws: random selections per turn; their mean is reported.

    Raises:
        UserError: a ratio outside 0..1, or no draw.
    """

    def __init__(self, deviation: Tensor, rhos: Sequence[float], draws: int, seed: int) -> None:
        if bad := [rho for rho in rhos if not 0 <= rho <= 1]:
            raise UserError(f"rho={bad[0]} lies outside 0..1")
        if draws < 1:
            raise UserError("random selection needs at least one draw")
        self._deviation = deviation
        self._rhos = tuple(rhos)
        self._draws = draws
        self._generator = torch.Generator().manual_seed(seed)

    def rows(self, executor: Executor, workflow: TraceWorkflow) -> Iterator[CoverageRow]:
        """Every criterion at every ratio, for each turn that reuses something."""
        for turn in exact_turns(executor, workflow, received=True):
            error = ReuseError.of(turn)
            if error is not None:
                for rho in self._rhos:
                    yield from self._turn(turn, error, rho)

    def _turn(self, turn: ExactTurn, error: ReuseError, rho: float) -> Iterator[CoverageRow]:
        energy = error.energy
        scores: dict[Unit, dict[str, Tensor]] = {
            "layer": {"layer": self._deviation, "oracle": energy.sum(dim=(0, 2))},
            "token": {
                "deviation": error.deviation,
                "attention": error.attention,
                "oracle": energy.sum(dim=(0, 1)),
            },
        }
        before = error.total()
        for unit, criteria in scores.items():
            size = error.layers if unit == "layer" else error.tokens
            count = round((1 - rho) * size)
            masks = {name: [_without(score, count)] for name, score in criteria.items()}
            masks["random"] = [_without(self._chance(size), count) for _ in range(self._draws)]
            for criterion, drawn in masks.items():
                after = [error.total(m[:, None] if unit == "layer" else m) for m in drawn]
                left = [sum(values) / len(after) for values in zip(*after, strict=True)]
                yield CoverageRow(
                    turn.request,
                    turn.node,
                    unit,
                    criterion,
                    rho,
                    error.tokens,
                    count,
                    count / size,
                    energy_before=before[0],
                    energy_after=left[0],
                    norm_before=before[1],
                    norm_after=left[1],
                )

    def _chance(self, size: int) -> Tensor:
        return torch.rand(size, generator=self._generator)


def mean_deviation(executor: Executor, workflows: Sequence[TraceWorkflow]) -> Tensor:
    """Mean relative error of plain reuse per layer over all edges (DroidSpeak), ``[layers]``.

    Raises:
        UserError: no edge to profile.
    """
    errors = [
        layer_errors(segment.cache, segment.source)
        for workflow in workflows
        for turn in exact_turns(executor, workflow)
        for segment in turn.segments
        if segment.source is not None
    ]
    if not errors:
        raise UserError("layer selection is profiled on requests of its own; give --calibration")
    return torch.stack(errors).mean(dim=0)


def _without(score: Tensor, count: int) -> Tensor:
    """Booleans of what is left when the ``count`` highest scores are taken."""
    left = torch.ones(len(score), dtype=torch.bool, device=score.device)
    left[score.topk(count).indices] = False
    return left
