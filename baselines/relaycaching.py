"""RelayCaching: rebuild a few tokens in a range of layers (arXiv 2603.13289).

In the first layers of the range all shared rows are executed, from residual rows that their source
relays; the detection layer then keeps the rows whose values deviate, the rows that attracted
attention when they were written, and the end of the segment. The layer ranges of the paper's models
and the rule behind them are not known to us: :func:`choose_range` is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.selective import Reused, Selective, require_share
from kvcmas.engine.contract import (
    Candidates,
    Enter,
    Event,
    Leave,
    Select,
    Wants,
    require_at_least,
    require_choice,
    require_count,
)
from kvcmas.errors import UserError

Span = tuple[int, int, int]
# A range is cut where its budget would leave a smaller share of rows than this in it.
LEAST_RATIO = 0.05
# How many layers after the start may detect.
DETECT_WITHIN = 4


@dataclass(frozen=True)
class RelayCaching(Selective):
    """Recompute selected rows in the layers of ``span``, per segment.

    Attributes:
        span: ``(start, detect, end)``: all rows are rebuilt in ``start..detect-1``, the selected
            ones in ``detect..end``. None rebuilds nothing. ``start < detect``, because a value is a
            function of the residual row: in the layer where rows enter nothing deviates.
        ratio: share of a segment's rows that is selected, the highest scores first; None selects
            by threshold, as published, with whatever rho results.
        tau_dev: threshold of the value deviation, relative to the segment's mean.
        tau_inf: the same for the received attention.
        suffix: last tokens of a segment that are always selected, on the budget if there is one.
        influence: attention received from ``decode`` steps (Eq. 6), for a prompt's PH from those of
            its first reader; from ``all`` later rows of that turn; or ``none``. Where a source has
            none, deviation decides alone.
    """

    name: ClassVar[str] = "relaycaching"

    span: Span | None = None
    ratio: float | None = None
    tau_dev: float = 1.5
    tau_inf: float = 1.45
    suffix: int = 10
    influence: Literal["decode", "all", "none"] = "decode"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.span is not None:
            object.__setattr__(self, "span", _checked(self.span))
        if self.ratio is not None:
            require_share("ratio", self.ratio)
        require_at_least("tau_dev", self.tau_dev, 0)
        require_at_least("tau_inf", self.tau_inf, 0)
        require_count("suffix", self.suffix, 0)
        require_choice("influence", self.influence, ("decode", "all", "none"))

    @classmethod
    def for_rho(cls, rho: float, layers: int, span: Span, *, suffix: int = 10) -> RelayCaching:
        """Fixed budget: the ``ratio`` that realises ``rho`` in ``span``.

        ``rho = 1 - (detect - start + (end - detect + 1) ratio) / layers``. The suffix is charged
        first, so on short segments the published 10 tokens can take the whole budget.

        Raises:
            UserError: a ``rho`` outside 0..1, or one that this range cannot realise.
        """
        require_share("rho", rho)
        start, _, end = _checked(span)
        ratio = _ratio(rho, layers, span)
        if not 0 <= ratio <= 1:
            raise UserError(f"rho={rho} is out of reach for layers {start}-{end} of {layers}")
        return cls(span=span, ratio=ratio, suffix=suffix)

    @property
    def wants(self) -> Wants:
        """Residual rows where the range starts, and the attention received."""
        if self.span is None:
            return Wants()
        start = self.span[0]
        return Wants(
            hidden_layers=(start,) if start else (),
            received=None if self.influence == "none" else self.influence,
        )

    @property
    def reason(self) -> str:
        """See :class:`Selective`."""
        if self.span is None:
            return ""
        return "deviation" if self.influence == "none" else "deviation or influence"

    @property
    def deepest(self) -> int:
        """See :class:`Selective`."""
        return 0 if self.span is None else self.span[2]

    def schedule(self, reused: Reused) -> tuple[Event, ...]:
        """All rows enter at the start, are selected at the detection layer and leave at the end."""
        if self.span is None:
            return ()
        start, detect, end = self.span
        return (
            Enter(start, reused.rows, reused.residual(start)),
            Select(detect, reused.rows, self._chooser(reused)),
            Leave(end + 1, reused.rows),
        )

    def _chooser(self, reused: Reused) -> Callable[[Candidates], Tensor]:
        def choose(candidates: Candidates) -> Tensor:
            deviation = value_deviation(candidates.v_new, candidates.v_old).cpu()
            kept = []
            for fill, inside in reused.per_segment(candidates.rows):
                rows = candidates.rows[inside]
                score = _relative(deviation[inside], self.tau_dev)
                received = fill.cache.received
                if self.influence != "none" and received is not None:
                    at = rows - reused.prompt.rows(fill.segment).start
                    score = score.maximum(_relative(received.cpu()[at], self.tau_inf))
                kept.append(rows[self._keep(score)])
            return torch.cat(kept)

        return choose

    def _keep(self, score: Tensor) -> Tensor:
        """Indices of the selected rows of one segment; at a score of 1 a threshold is met."""
        count = len(score)
        if self.ratio is not None:
            count = round(self.ratio * count)
        suffix = min(self.suffix, count)
        score[len(score) - suffix :] = torch.inf
        if self.ratio is None:
            count = int((score >= 1).sum())
        return score.topk(count).indices


def value_deviation(new: Tensor, old: Tensor) -> Tensor:
    """``1 - cos`` of each token's values over all heads, ``[..., tokens]`` (Eq. 1).

    Args:
        new: fresh values ``[..., kv_heads, tokens, head_dim]``; a leading axis may hold layers.
        old: reused values of the same shape.
    """
    flat = [v.float().transpose(-3, -2).flatten(-2) for v in (new, old)]
    return (1 - F.cosine_similarity(flat[0], flat[1], dim=-1)).clamp(min=0)


def choose_range(deviation: Tensor, *, rho: float | None = None) -> Span:
    """Layer range from the deviation of plain reuse on calibration tokens.

    The range holds the layers whose mean deviation is at least half of the highest. Among the
    ``DETECT_WITHIN`` layers after its start, the one detects whose deviations rank the tokens most
    like the later layers of the range do (mean Spearman correlation).

    Args:
        deviation: :func:`value_deviation` per layer and token, ``[layers, tokens]``.
        rho: cut the range so that :meth:`RelayCaching.for_rho` keeps ``LEAST_RATIO`` of the rows.

    Raises:
        UserError: fewer than two layers or tokens, or a ``rho`` that no range can realise.
    """
    layers, tokens = deviation.shape
    if layers < 2 or tokens < 2:
        raise UserError("a layer range needs the deviation of at least two layers and tokens")
    mean = deviation.mean(dim=1)
    high = (mean >= mean.max() / 2).nonzero().squeeze(1)
    start, end = int(high[0]), int(high[-1])
    if start == end:
        start, end = (start, end + 1) if end + 1 < layers else (start - 1, end)
    agreement = torch.corrcoef(deviation.argsort(dim=1).argsort(dim=1).double())
    spans: list[tuple[float, Span]] = []
    for detect in range(start + 1, min(start + DETECT_WITHIN, end) + 1):
        last = end
        if rho is not None:
            spare = (1 - rho) * layers - (detect - start)
            last = min(end, detect - 1 + int(spare / LEAST_RATIO))
        if last >= detect:
            later = agreement[detect, detect + 1 : last + 1]
            spans.append((float(later.mean()) if len(later) else -1.0, (start, detect, last)))
    if not spans:
        raise UserError(f"rho={rho} leaves RelayCaching no budget in a model of {layers} layers")
    return max(spans, key=lambda scored: scored[0])[1]


def candidate_spans(layers: int, rho: float, *, step: int = 1) -> list[Span]:
    """Ranges that detect one layer after their start and can realise ``rho``, on a grid of layers.

    An alternative to :func:`choose_range`: with :func:`baselines.selective.search` over these the
    range is the one that leaves the least error when it is run. ``LEAST_RATIO`` holds here, too.
    """
    spans = [
        (start, start + 1, end)
        for start in range(0, layers - 1, step)
        for end in range(start + step, layers, step)
    ]
    return [span for span in spans if LEAST_RATIO <= _ratio(rho, layers, span) <= 1]


def _ratio(rho: float, layers: int, span: Span) -> float:
    """Share of rows from the detection layer on; outside 0..1 if ``rho`` is out of reach."""
    start, detect, end = span
    # Rounded, so that a budget of exactly nothing or everything is not missed by an ulp.
    return round(((1 - rho) * layers - (detect - start)) / (end - detect + 1), 9)


def _relative(score: Tensor, tau: float) -> Tensor:
    """Scores in units of ``tau`` times their mean; zeros if there is nothing but zeros."""
    return score / (tau * score.mean()).clamp(min=torch.finfo(score.dtype).tiny)


def _checked(span: Span) -> Span:
    try:
        start, detect, end = (index(layer) for layer in span)
    except (TypeError, ValueError):
        raise UserError(f"span={span!r} is not three layers (start, detect, end)") from None
    if not 0 <= start < detect <= end:
        raise UserError(f"span={span!r} must have 0 <= start < detect <= end")
    return start, detect, end
