"""`repro analyze ranks`: how many dimensions caches and deltas occupy (Figures 2 and 7).

The deltas that agent-specific segments (PF) induce are taken apart in four ways, see
:data:`results.analysis.KINDS`, because appendix A.2 leaves open which it means: ``pf_system`` swaps
recurring PF contexts before one segment, ``pf_presence`` is the setting of the preconstructed
corrections that it refers to, ``pf_bare`` is that with no token before the reference, ``pf_glue``
looks at glue alone. Where the query directly follows the
system prompt, its workflow deltas are the ``pf_system`` deltas of consecutive agents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, Segment
from kvcmas.pool.anchors import REFERENCE
from kvcmas.pool.lowrank import flat
from repro.runners.analysis import ExactTurn, context_free, dense, exact_turns
from results.analysis import ENERGY, RETAINED, Kind, Part, RankRow
from traces.schema import TraceWorkflow


def energies(z: Tensor) -> Tensor:
    """Squared singular values of ``z [layers, tokens, D]``, descending: ``[layers, min]``, fp64.

    By the smaller Gram matrix in fp64: small energies are exact to 1e-16 of the largest.
    """
    z = z.double()
    gram = z @ z.mT if z.shape[1] < z.shape[2] else z.mT @ z
    return torch.linalg.eigvalsh(gram).flip(-1).clamp_min(0)


def effective_rank(energy: Tensor, share: float = ENERGY) -> Tensor:
    """Least rank that keeps ``share`` of the descending ``energy [..., ranks]``; 0 for zero."""
    kept = energy.cumsum(-1)
    # Rounding of the sum must not cost a rank.
    enough = share * kept[..., -1:] * (1 - 1e-12)
    return (kept < enough).sum(-1) + (kept[..., -1] > 0).long()


def retained(energy: Tensor, rank: int) -> Tensor:
    """Share of the energy that the leading ``rank`` directions keep, ``[...]``; 1 for zero."""
    total = energy.sum(-1)
    lost = energy[..., rank:].sum(-1)
    return torch.where(total > 0, 1 - lost / total.clamp_min(torch.finfo(total.dtype).tiny), 1.0)


@dataclass(frozen=True)
class Matrices:
    """One cache or delta, ``k, v [layers, kv_heads, tokens, head_dim]``, and what it is.

    ``target`` is the cache that a delta leads to; None for a base.
    """

    kind: Kind
    slot: str
    source: str
    target_node: str | None
    pf_tokens: int | None
    k: Tensor
    v: Tensor
    target: SegmentCache | None

    @classmethod
    def delta(
        cls,
        kind: Kind,
        slot: str,
        source: tuple[str, SegmentCache],
        target: tuple[str, SegmentCache],
        pf_tokens: int | None = None,
    ) -> Matrices:
        """From a source to a target cache, each with its node; both canonical, hence aligned."""
        (before, old), (after, new) = source, target
        # In fp32: a difference of rounded numbers need not be rounded again.
        k, v = new.k.float() - old.k.float(), new.v.float() - old.v.float()
        return cls(kind, slot, before, after, pf_tokens, k, v, new)


def rank_rows(
    executor: Executor, workflow: TraceWorkflow, reference_prefix: Sequence[int]
) -> Iterator[RankRow]:
    """Rows of every base, delta and PF-induced delta of one workflow, per layer, K and V."""
    turns = list(exact_turns(executor, workflow))
    for matrices in (
        *workflow_matrices(turns),
        *system_deltas(executor, turns, reference_prefix),
        *glue_deltas(executor, turns),
    ):
        yield from _rows(workflow.request, matrices)


def workflow_matrices(turns: Sequence[ExactTurn]) -> Iterator[Matrices]:
    """Base and delta of every edge."""
    for turn in turns:
        for segment in turn.segments:
            if segment.source is None or segment.holder is None:
                continue
            slot, source = segment.slot, segment.source
            yield Matrices("base", slot, segment.holder, None, None, source.k, source.v, None)
            held = (segment.holder, source)
            yield Matrices.delta("delta", slot, held, (turn.node, segment.cache))


def system_deltas(
    executor: Executor, turns: Sequence[ExactTurn], reference_prefix: Sequence[int]
) -> Iterator[Matrices]:
    """``pf_system``, ``pf_presence``, ``pf_bare``: the segment only the system prompt precedes."""
    leading: dict[str, list[_Leading]] = {}
    for turn in turns:
        for segment in turn.segments[:1]:
            own = turn.prompt.ids[: turn.prompt.rows(segment.index).start]
            if own:
                shared = turn.prompt.segments[segment.index]
                user = _Leading(turn.node, own, shared, segment.cache)
                leading.setdefault(segment.slot, []).append(user)
    for slot, users in leading.items():
        for a, b in combinations(users, 2):
            if a.own != b.own:
                ends = (a.node, a.cache), (b.node, b.cache)
                yield Matrices.delta("pf_system", slot, *ends, len(b.own))
        kinds: tuple[tuple[Kind, Sequence[int]], ...] = (
            ("pf_presence", reference_prefix),
            ("pf_bare", ()),
        )
        for kind, prefix in kinds:
            reference = (REFERENCE, context_free(executor, prefix, users[0].shared))
            for user in users:
                here = (user.node, user.cache)
                yield Matrices.delta(kind, slot, reference, here, len(user.own))


class _Leading(NamedTuple):
    """A segment of a turn that nothing precedes but the agent's ``own`` ids."""

    node: str
    own: list[int]
    shared: Segment
    cache: SegmentCache


def glue_deltas(executor: Executor, turns: Sequence[ExactTurn]) -> Iterator[Matrices]:
    """``pf_glue``: segments after the first, with and without the glue right before them."""
    for turn in turns:
        for segment in turn.segments[1:]:
            parts = turn.prompt.segments
            glue = parts[segment.index - 1]
            if glue.kind != "PF" or not len(glue):
                continue
            without = Prompt((*parts[: segment.index - 1], parts[segment.index]))
            rows = without.rows(segment.index - 1)
            bare = dense(executor, without).extract(rows)
            yield Matrices.delta(
                "pf_glue", segment.slot, (turn.node, bare), (turn.node, segment.cache), len(glue)
            )


def _rows(request: str, matrices: Matrices) -> Iterator[RankRow]:
    parts: tuple[tuple[Part, Tensor], ...] = (("k", matrices.k), ("v", matrices.v))
    for part, kv in parts:
        z = flat(kv)
        energy = energies(z)
        ranks = effective_rank(energy).tolist()
        kept = {rank: retained(energy, rank).tolist() for rank in RETAINED}
        norms: list[float | None] = [None] * len(ranks)
        if matrices.target is not None:
            target = getattr(matrices.target, part).double().flatten(1).norm(dim=1)
            norms = (energy.sum(-1).sqrt() / target).tolist()
        for layer, rank in enumerate(ranks):
            # Layer 0 of a delta is zero (DESIGN section 5, rule 4); its rounding has no rank.
            rounding = layer == 0 and matrices.kind != "base"
            errors = [max(0.0, 1 - kept[r][layer]) ** 0.5 for r in RETAINED]
            yield RankRow(
                request,
                matrices.kind,
                matrices.slot,
                matrices.source,
                matrices.target_node,
                part,
                layer,
                z.shape[1],
                z.shape[2],
                matrices.pf_tokens,
                norms[layer],
                None if rounding else rank,
                None if rounding else kept[8][layer],
                *([None] * len(RETAINED) if rounding else errors),
            )
