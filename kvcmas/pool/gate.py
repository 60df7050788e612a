"""The reliability gate and interpolation weights shared by online anchor methods (paper A.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def softmax_scores(distances: Tensor, temperature: float = 1.0) -> Tensor:
    """``softmax(-d / T)`` in fp64 (Eq. 10)."""
    return torch.softmax(-distances.double() / temperature, dim=0)


def normalised_entropy(distances: Tensor, temperature: float = 1.0) -> float:
    """Normalised entropy in [0, 1] of the gate scores (Eq. 10-11), by log-sum-exp in fp64.

    Raises:
        ValueError: fewer than two distances; the measure is undefined.
    """
    if distances.numel() < 2:
        raise ValueError("normalised entropy needs at least two anchors")
    log_scores = torch.log_softmax(-distances.double() / temperature, dim=0)
    entropy = -(log_scores.exp() * log_scores).sum().item()
    return min(max(entropy / math.log(distances.numel()), 0.0), 1.0)


def shared_prefix(length: int, anchor_lengths: Sequence[int]) -> int:
    """Longest prefix, at most ``length``, that at least two anchors cover; else 0."""
    covering = sorted((min(length, n) for n in anchor_lengths), reverse=True)
    return covering[1] if len(covering) > 1 else 0


def used_anchors(scores: Tensor, top_p: float = 0.9, *, quirk: bool = False) -> list[int]:
    """Anchors whose use count grows when a correction is accepted, most similar first.

    By descending score, up to and including the last one whose cumulative score stays below
    ``top_p``. If the best alone reaches it, only that one; with ``quirk`` all of them, as the
    public KVComm code does.
    """
    order = scores.argsort(descending=True, stable=True)
    below = (scores[order].cumsum(0) < top_p).nonzero()
    reaching_none = len(order) - 1 if quirk else 0
    last = int(below[-1]) if below.numel() else reaching_none
    return order[: last + 1].tolist()


@dataclass(frozen=True)
class Verdict:
    """Whether a correction is taken, and why.

    Attributes:
        reason: ``accepted``; ``forced`` either way; refused as ``cold`` (too few anchors) or for
            its ``entropy``. Methods add their own.
        entropy: normalised, where at least two anchors were compared.
        used: indices of the anchors whose use count grows.
    """

    accepted: bool
    reason: str
    entropy: float | None = None
    used: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gate:
    """Accepts a correction iff its anchor scores' normalised entropy is at most ``threshold``.

    Attributes:
        bypass: accept whenever there is an anchor: a pool of one can never be compared (paper C.3).
        quirk: see :func:`used_anchors`.
    """

    threshold: float
    temperature: float = 1.0
    bypass: bool = False
    quirk: bool = False

    def judge(self, distances: Tensor, forced: bool | None = None) -> Verdict:
        """Verdict on ``distances [anchors]`` of the eligible anchors; ``forced`` overrules it.

        Without any anchor nothing can be corrected, forced or not.
        """
        count = distances.numel()
        if forced is False:
            return Verdict(False, "forced")
        if count == 0 or (count == 1 and not (self.bypass or forced)):
            return Verdict(False, "cold")
        entropy = normalised_entropy(distances, self.temperature) if count > 1 else None
        if entropy is not None and entropy > self.threshold and not (self.bypass or forced):
            return Verdict(False, "entropy", entropy)
        used = used_anchors(softmax_scores(distances, self.temperature), quirk=self.quirk)
        return Verdict(True, "forced" if forced else "accepted", entropy, tuple(used))
