"""KVComm's prefix offsets: PF rows from a template, corrected by the anchors of the PH before them.

The public code prefills every agent's prompt once with marker texts in place of its PH. Here the
template is the agent's first dense prompt: what lies in a PF's context is the text of one request
instead of a marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.fullrank import Pair
from kvcmas.engine.cache import Buffer, SegmentCache
from kvcmas.engine.contract import Fill, State, Turn
from kvcmas.engine.segments import ids_sha256
from kvcmas.pool.anchors import BASE, Anchor


@dataclass(frozen=True)
class PrefixCorrection:
    """``sum_v w_v delta_v`` with a weight per layer, head and channel, the same for all tokens.

    ``weights_k, weights_v [deltas, layers - 1, kv_heads, head_dim]`` fp32, layers from 1.
    """

    rows: int
    weights_k: Tensor
    weights_v: Tensor
    deltas: Sequence[Pair]

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add the delta of ``layer`` (from 1) in place."""
        for target, weights, deltas in (
            (k, self.weights_k, [delta.k for delta in self.deltas]),
            (v, self.weights_v, [delta.v for delta in self.deltas]),
        ):
            total = target.float()
            for weight, delta in zip(weights, deltas, strict=True):
                total.addcmul_(delta[layer - 1].float(), weight[layer - 1, :, None])
            target.copy_(total)


class PrefixOffsets:
    """PF templates of every agent; process-wide. The deltas lie with the anchors."""

    def __init__(self) -> None:
        self._templates: dict[str, SegmentCache] = {}

    def learn(self, turn: Turn, buffer: Buffer) -> None:
        """Keep PF that are new from a prompt that was executed as a whole."""
        for prefix in prefixes(turn):
            if prefix.key not in self._templates:
                self._templates[prefix.key] = buffer.extract(turn.prompt.rows(prefix.segment))

    def deltas(self, turn: Turn, segment: int, buffer: Buffer) -> dict[str, Pair]:
        """Deltas against their templates of the PF that follow PH ``segment``, by name."""
        return {
            prefix.key: Pair.delta(
                buffer.extract(turn.prompt.rows(prefix.segment)), self._templates[prefix.key]
            )
            for prefix in prefixes(turn)
            if prefix.owner == segment and prefix.key in self._templates
        }

    def fills(
        self,
        turn: Turn,
        corrected: Mapping[int, tuple[SegmentCache, Sequence[Anchor[Pair]]]],
        temperature: float,
    ) -> list[Fill]:
        """Fills of every known PF; those after a PH only if its anchors know them too.

        Args:
            corrected: base cache and anchors of every PH of the prompt.
        """
        fills = []
        for prefix in prefixes(turn):
            template = self._templates.get(prefix.key)
            if template is None:
                continue
            if prefix.owner is None:
                # Nothing but PF precedes it: the template is exact.
                fills.append(Fill(prefix.segment, template))
                continue
            cache, anchors = corrected[prefix.owner]
            anchors = [anchor for anchor in anchors if prefix.key in anchor.parts]
            if anchors:
                bases = [anchor.parts[BASE] for anchor in anchors]
                correction = PrefixCorrection(
                    rows=len(template),
                    weights_k=_weights(cache.k, [base.k for base in bases], temperature),
                    weights_v=_weights(cache.v, [base.v for base in bases], temperature),
                    deltas=[anchor.parts[prefix.key] for anchor in anchors],
                )
                fills.append(Fill(prefix.segment, template, correction))
        return fills

    def state(self) -> State:
        """The templates, one entry per PF."""
        entries = {key: {"k": t.k, "v": t.v} for key, t in self._templates.items()}
        return State({"templates": list(entries)}, entries)

    def load_state(self, state: State) -> None:
        """Restore :meth:`state`."""
        self._templates = {
            key: SegmentCache(state.entries[key]["k"], state.entries[key]["v"])
            for key in state.meta["templates"]
        }


@dataclass(frozen=True)
class Prefix:
    """A PF segment, the PH it follows (None at the start) and its name in templates and anchors."""

    segment: int
    owner: int | None
    key: str


def prefixes(turn: Turn) -> Iterator[Prefix]:
    """Every non-empty PF; named after the agent's turn, its own ids and all PF ids before it."""
    owner, before = None, list[int]()
    for i, segment in enumerate(turn.prompt.segments):
        if not len(segment):
            continue
        if segment.kind == "PH":
            owner = i
        else:
            before += segment.ids
            yield Prefix(i, owner, f"{turn.node}-{ids_sha256(before)[:16]}-{len(segment)}")


def _weights(kv: Tensor, bases: Sequence[Tensor], temperature: float) -> Tensor:
    """Softmax over bases of the Euclidean distance along the token axis, layers from 1.

    ``kv [layers, kv_heads, tokens, head_dim]`` is compared with the last ``tokens`` rows of each
    base. Returns ``[bases, layers - 1, kv_heads, head_dim]`` fp32.
    """
    layers, heads, rows, dim = kv.shape
    distances = torch.empty(len(bases), layers - 1, heads, dim, device=kv.device)
    for i, base in enumerate(bases):
        for layer in range(1, layers):
            difference = kv[layer].float() - base[layer, :, -rows:].float()
            distances[i, layer - 1] = torch.linalg.vector_norm(difference, dim=1)
    return torch.softmax(-distances / temperature, dim=0)
