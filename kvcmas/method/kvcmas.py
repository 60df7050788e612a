"""KVCMAS: low-rank, chained, online correction of shared caches (paper section 3 and A.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvcmas.engine.cache import Buffer, SegmentCache
from kvcmas.engine.contract import (
    Decision,
    Edge,
    Fill,
    Method,
    Plan,
    Sources,
    State,
    Turn,
    Wants,
    require_at_least,
    require_choice,
)
from kvcmas.errors import UserError
from kvcmas.pool.anchors import Anchor, AnchorPool, CapacityRule
from kvcmas.pool.gate import normalised_entropy, shared_prefix, softmax_scores, used_anchors
from kvcmas.pool.lowrank import (
    BLOCK,
    Factorisation,
    Factors,
    factorise,
    flat,
    prefix_distances,
    token_distances,
    weighted_sum,
)

# Name of the source node of every edge when the reference is context-free.
REFERENCE = "ref"


@dataclass(frozen=True)
class EdgeFactors:
    """What an anchor holds for one edge: factors of the source cache (base) and of the delta.

    Deltas leave out layer 0, where they are zero. ``base_k`` and ``base_v`` are None where the
    anchor keeps one base for all its edges and another edge has it.
    """

    delta_k: Factors
    delta_v: Factors
    base_k: Factors | None = None
    base_v: Factors | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Flat tensors by name."""
        parts = {
            "delta_k": self.delta_k,
            "delta_v": self.delta_v,
            "base_k": self.base_k,
            "base_v": self.base_v,
        }
        return {
            f"{name}.{side}": getattr(f, side)
            for name, f in parts.items()
            if f is not None
            for side in "ab"
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> EdgeFactors:
        """Inverse of :meth:`tensors`."""
        names = {name.split(".")[0] for name in tensors}
        return cls(**{name: Factors(tensors[f"{name}.a"], tensors[f"{name}.b"]) for name in names})


@dataclass(frozen=True)
class LowRankCorrection:
    """``sum_v w_v A_v B_v`` with weights per token, K and V apart (Eq. 8).

    ``weights_k, weights_v [anchors, rows]``; ``used`` are the requests whose use counts grow.
    """

    rows: int
    weights_k: Tensor
    weights_v: Tensor
    deltas: Sequence[EdgeFactors]
    used: tuple[str, ...]

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add the delta of ``layer`` (from 1) in place, block by block."""
        for target, weights, deltas in (
            (k, self.weights_k, [d.delta_k for d in self.deltas]),
            (v, self.weights_v, [d.delta_v for d in self.deltas]),
        ):
            heads, _, dim = target.shape
            for start in range(0, self.rows, BLOCK):
                part = slice(start, min(start + BLOCK, self.rows))
                delta = weighted_sum(weights, deltas, layer - 1, part)
                target[:, part] += delta.unflatten(1, (heads, dim)).transpose(0, 1).to(target.dtype)


@dataclass(frozen=True)
class KVCMAS(Method):
    """The paper's method; defaults are its defaults.

    Attributes:
        tau: reliability threshold on the normalised entropy; higher reuses more (A.3).
        rank_base: rank r_C of the stored source caches, None for full.
        rank_delta: rank r_delta of the stored corrections, None for full.
        capacity: V, anchors per slot. With 1 the gate is bypassed (C.3).
        temperature: T of the gate's and the weights' softmax.
        window: how many of the oldest anchors compete for eviction.
        capacity_rule: ``strict`` holds V anchors (the paper), ``authors`` V + 1 (their code).
        chained: correct relative to the source agent's cache; False is the ablation with a
            context-free reference, where the first agent is corrected as well (B.5).
        base: ``per_edge`` source caches (A.3) or one ``shared`` by all edges of an anchor (3.3).
        coverage: ``prefix`` corrects with anchors that cover all tokens, else the longest covered
            prefix; ``per_token`` lets every token use each anchor that reaches it (our variant).
        factorisation: ``exact`` or ``randomised`` (seeded by ``svd_seed``).
        top_p_quirk: count uses as the public KVComm code does.
        first_turn: non-chained only: is the first agent ``corrected`` or ``dense``.
        reference: non-chained only: is the reference prefill ``on_path`` or in the ``background``.
    """

    name: ClassVar[str] = "kvcmas"

    tau: float = 0.3
    rank_base: int | None = 32
    rank_delta: int | None = 32
    capacity: int = 10
    temperature: float = 1.0
    window: int = 5
    capacity_rule: CapacityRule = "strict"
    chained: bool = True
    base: Literal["per_edge", "shared"] = "per_edge"
    coverage: Literal["prefix", "per_token"] = "prefix"
    factorisation: Factorisation = "exact"
    svd_seed: int = 0
    top_p_quirk: bool = False
    first_turn: Literal["corrected", "dense"] = "corrected"
    reference: Literal["on_path", "background"] = "on_path"
    pool: AnchorPool[EdgeFactors] = field(init=False, repr=False, compare=False)
    _generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("tau", self.tau, 0)
        for name in ("rank_base", "rank_delta"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)
        require_at_least("capacity", self.capacity, 1)
        require_at_least("window", self.window, 1)
        if not self.temperature > 0:
            raise UserError(f"temperature={self.temperature!r} must be positive")
        require_choice("capacity_rule", self.capacity_rule, get_args(CapacityRule))
        require_choice("base", self.base, ("per_edge", "shared"))
        require_choice("coverage", self.coverage, ("prefix", "per_token"))
        require_choice("factorisation", self.factorisation, get_args(Factorisation))
        require_choice("first_turn", self.first_turn, ("corrected", "dense"))
        require_choice("reference", self.reference, ("on_path", "background"))
        if self.chained and (self.first_turn, self.reference) != ("corrected", "on_path"):
            raise UserError("first_turn and reference only apply with chained=False")
        object.__setattr__(self, "pool", AnchorPool(self.capacity, self.window, self.capacity_rule))
        object.__setattr__(self, "_generator", torch.Generator().manual_seed(self.svd_seed))

    @property
    def wants(self) -> Wants:
        """Source caches when chained; references otherwise."""
        return Wants(
            sources=self.chained,
            background_reference=not self.chained and self.reference == "background",
        )

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Correct every PH whose gate accepts; the others are dense (A.3)."""
        fills, decisions = [], []
        for segment in turn.prompt.shared():
            fill, decision = self._decide(turn, sources, segment)
            decisions.append(decision)
            if fill is not None:
                fills.append(fill)
        return Plan.make(turn.prompt, tuple(fills), tuple(decisions))

    def after_first_token(self, turn: Turn, sources: Sources, plan: Plan, buffer: Buffer) -> None:
        """Count accepted reuse; make anchors of dense fallbacks, never of accepted corrections."""
        for fill in plan.fills:
            if isinstance(fill.correction, LowRankCorrection):
                self.pool.use(turn.prompt.slot(fill.segment), list(fill.correction.used))
        for decision in plan.decisions:
            if decision.action == "dense" and decision.edge is not None:
                self._learn(turn, sources, decision.segment, decision.edge, buffer)

    def state(self) -> State:
        """The pool, and the generator of the randomised factorisation."""
        state = self.pool.state()
        state.meta["generator"] = self._generator.get_state().tolist()
        return state

    def load_state(self, state: State) -> None:
        """See :meth:`Method.load_state`."""
        self.pool.load_state(state, EdgeFactors.from_tensors)
        self._generator.set_state(torch.tensor(state.meta["generator"], dtype=torch.uint8))

    def correction(
        self,
        cache: SegmentCache,
        anchors: Sequence[Anchor[EdgeFactors]],
        edge: str,
        used: Sequence[str],
    ) -> LowRankCorrection:
        """Interpolate the anchors' deltas by the similarity of their bases to ``cache`` (A.3)."""
        rows = min(len(cache), max(anchor.length for anchor in anchors))
        if self.coverage == "prefix":
            anchors = [anchor for anchor in anchors if anchor.length >= rows]
        bases = [_base(anchor, edge) for anchor in anchors]
        weights = [
            torch.softmax(-token_distances(kv, base, rows) / self.temperature, dim=0)
            for kv, base in (
                (cache.k, [k for k, _ in bases]),
                (cache.v, [v for _, v in bases]),
            )
        ]
        return LowRankCorrection(
            rows, weights[0], weights[1], [a.edges[edge] for a in anchors], tuple(used)
        )

    def _decide(self, turn: Turn, sources: Sources, segment: int) -> tuple[Fill | None, Decision]:
        source = self._source(turn, sources, segment)
        if source is None:
            return None, Decision(segment, None, "dense", "first")
        cache, node = source
        edge = turn.edge(segment, node)
        forced = turn.force.get(segment)
        anchors = self.pool.compatible(edge.slot, _key(edge))
        entropy: float | None = None
        used: list[str] = []
        if forced is False:
            return None, Decision(segment, edge, "dense", "forced")
        if not anchors or (len(anchors) < 2 and self.capacity > 1 and forced is None):
            return None, Decision(segment, edge, "dense", "cold")
        if len(anchors) > 1:
            rows = shared_prefix(len(cache), [anchor.length for anchor in anchors])
            eligible = [anchor for anchor in anchors if anchor.length >= rows]
            distances = prefix_distances(cache.v, [_base(a, _key(edge))[1] for a in eligible], rows)
            entropy = normalised_entropy(distances, self.temperature)
            if forced is None and entropy > self.tau:
                return None, Decision(segment, edge, "dense", "entropy", entropy)
            scores = softmax_scores(distances, self.temperature)
            used = [eligible[i].request for i in used_anchors(scores, quirk=self.top_p_quirk)]
        fill = Fill(segment, cache, self.correction(cache, anchors, _key(edge), used))
        reason = "forced" if forced else "accepted"
        return fill, Decision(segment, edge, "correct", reason, entropy)

    def _source(
        self, turn: Turn, sources: Sources, segment: int
    ) -> tuple[SegmentCache, str] | None:
        if not self.chained:
            if turn.index == 0 and self.first_turn == "dense":
                return None
            return sources.reference(segment), REFERENCE
        held = sources.held(segment)
        return None if held is None else (held.cache, held.node)

    def _learn(
        self, turn: Turn, sources: Sources, segment: int, edge: Edge, buffer: Buffer
    ) -> None:
        source = self._source(turn, sources, segment)
        if source is None:
            raise ValueError(f"an edge without a source: {edge}")
        cache, rows = source[0], turn.prompt.rows(segment)
        target = buffer.extract(rows)
        anchor = self.pool.anchor(edge.slot, turn.request)
        keeps_base = self.base == "per_edge" or anchor is None
        payload = EdgeFactors(
            delta_k=self._factorise((target.k - cache.k)[1:], self.rank_delta),
            delta_v=self._factorise((target.v - cache.v)[1:], self.rank_delta),
            base_k=self._factorise(cache.k, self.rank_base) if keeps_base else None,
            base_v=self._factorise(cache.v, self.rank_base) if keeps_base else None,
        )
        self.pool.insert(
            edge.slot, turn.request, len(cache), _key(edge), payload, exact=buffer.exact(rows.stop)
        )

    def _factorise(self, kv: Tensor, rank: int | None) -> Factors:
        return factorise(flat(kv), rank, self.factorisation, self._generator)


def _key(edge: Edge) -> str:
    return f"{edge.source}>{edge.target}"


def _base(anchor: Anchor[EdgeFactors], edge: str) -> tuple[Factors, Factors]:
    """The base an edge is matched against: its own, else the one the anchor's edges share."""
    for factors in (anchor.edges[edge], *anchor.edges.values()):
        if factors.base_k is not None and factors.base_v is not None:
            return factors.base_k, factors.base_v
    raise ValueError(f"anchor {anchor.request} holds no base")
