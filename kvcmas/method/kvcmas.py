"""KVCMAS: low-rank, chained, online correction of shared caches (paper section 3 and A.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from kvcmas.engine.cache import Buffer, SegmentCache
from kvcmas.engine.contract import (
    Correction,
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
    require_count,
)
from kvcmas.errors import UserError
from kvcmas.method.correction import (
    LowRankCorrection,
    TokenCorrection,
    Weights,
    interpolate,
    match_tokens,
)
from kvcmas.pool.anchors import BASE, REFERENCE, Anchor, AnchorPool, CapacityRule, edge_key
from kvcmas.pool.gate import Gate, shared_prefix
from kvcmas.pool.lowrank import (
    Factorisation,
    FactorPair,
    Factors,
    by_token,
    factorise,
    prefix_distances,
)


@dataclass(frozen=True)
class KVCMAS(Method):
    """The paper's method; defaults are its defaults.

    Attributes:
        tau: reliability threshold on the normalised entropy; higher reuses more (A.3).
        rank_base: rank r_C of the stored source caches, None for full.
        rank_delta: rank r_delta of the stored corrections, None for full.
        capacity: V, anchors per slot. With 1 the gate is bypassed (C.3).
        temperature: T of the gate's softmax.
        window: how many of the oldest anchors compete for eviction.
        capacity_rule: ``strict`` holds V anchors (the paper), ``authors`` V + 1 (their code).
        chained: correct relative to the source agent's cache; False is the ablation with a
            context-free reference, where the first agent is corrected as well (B.5).
        base: ``per_edge`` source caches (A.3) or one ``shared`` by all edges of an anchor (3.3).
        coverage: ``prefix`` corrects with anchors that cover all tokens, else the longest covered
            prefix; ``per_token`` lets every token use each anchor that reaches it (our variant).
        factorisation: ``exact`` or ``randomised`` (seeded by ``svd_seed``).
        weights: ``distance`` (A.3), or one of our variants: ``uniform``, ``nearest_anchor``,
            ``token_knn`` (see :mod:`kvcmas.method.correction`).
        weight_temperature: T of the weights' softmax.
        neighbours: ``token_knn`` only: anchor tokens that each token is matched with, None for 4.
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
    weights: Weights = "distance"
    weight_temperature: float = 1.0
    neighbours: int | None = None
    top_p_quirk: bool = False
    first_turn: Literal["corrected", "dense"] = "corrected"
    reference: Literal["on_path", "background"] = "on_path"
    pool: AnchorPool[FactorPair] = field(init=False, repr=False, compare=False)
    _gate: Gate = field(init=False, repr=False, compare=False)
    _generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("tau", self.tau, 0)
        for name in ("rank_base", "rank_delta", "neighbours"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), 1)
        require_count("capacity", self.capacity, 1)
        require_count("window", self.window, 1)
        for name in ("temperature", "weight_temperature"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name}={getattr(self, name)!r} must be positive")
        require_choice("capacity_rule", self.capacity_rule, get_args(CapacityRule))
        require_choice("base", self.base, ("per_edge", "shared"))
        require_choice("coverage", self.coverage, ("prefix", "per_token"))
        require_choice("factorisation", self.factorisation, get_args(Factorisation))
        require_choice("weights", self.weights, get_args(Weights))
        require_choice("first_turn", self.first_turn, ("corrected", "dense"))
        require_choice("reference", self.reference, ("on_path", "background"))
        if self.chained and (self.first_turn, self.reference) != ("corrected", "on_path"):
            raise UserError("first_turn and reference only apply with chained=False")
        if self.weights in ("uniform", "nearest_anchor") and self.weight_temperature != 1:
            raise UserError(f"weights={self.weights!r} has no weight_temperature")
        if self.weights != "token_knn" and self.neighbours is not None:
            raise UserError("neighbours only applies with weights='token_knn'")
        if self.weights in ("nearest_anchor", "token_knn") and self.coverage != "prefix":
            raise UserError(f"coverage='per_token' does not apply with weights={self.weights!r}")
        gate = Gate(self.tau, self.temperature, self.capacity == 1, self.top_p_quirk)
        object.__setattr__(self, "pool", AnchorPool(self.capacity, self.window, self.capacity_rule))
        object.__setattr__(self, "_gate", gate)
        object.__setattr__(self, "_generator", torch.Generator().manual_seed(self.svd_seed))

    @property
    def wants(self) -> Wants:
        """Source caches when chained; references otherwise."""
        return Wants(
            sources=self.chained,
            references=not self.chained,
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
            if isinstance(fill.correction, LowRankCorrection | TokenCorrection):
                self.pool.use(turn.prompt.slot(fill.segment), fill.correction.used)
        for decision in plan.decisions:
            if decision.action == "dense" and decision.edge is not None:
                self._learn(turn, sources, decision.segment, decision.edge, buffer)

    def state(self) -> State:
        """The pool, and the generator of the randomised factorisation."""
        state = self.pool.state()
        state.meta |= {"method": self.name, "generator": self._generator.get_state().tolist()}
        return state

    def load_state(self, state: State) -> None:
        """See :meth:`Method.load_state`."""
        if state.meta.get("method") != self.name:
            raise ValueError(f"not a state of {self.name}: {state.meta.get('method')}")
        self.pool.load_state(state, FactorPair.from_tensors)
        self._generator.set_state(torch.tensor(state.meta["generator"], dtype=torch.uint8))

    def correction(
        self,
        cache: SegmentCache,
        anchors: Sequence[Anchor[FactorPair]],
        edge: str,
        used: tuple[str, ...] = (),
    ) -> Correction:
        """Combine what ``anchors`` hold for ``edge``, weighted by how their bases match ``cache``.

        ``used`` are the requests whose use counts grow with the correction.
        """
        rows = min(len(cache), max(anchor.length for anchor in anchors))
        if self.coverage == "prefix" and self.weights != "token_knn":
            anchors = [anchor for anchor in anchors if anchor.length >= rows]
        bases = [anchor.parts[self.base_key(edge)] for anchor in anchors]
        deltas = [anchor.parts[edge] for anchor in anchors]
        temperature = self.weight_temperature
        if self.weights == "token_knn":
            return match_tokens(cache, bases, deltas, used, self.neighbours or 4, temperature)
        return interpolate(cache, bases, deltas, rows, used, self.weights, temperature)

    def _decide(self, turn: Turn, sources: Sources, segment: int) -> tuple[Fill | None, Decision]:
        source = self._source(turn, sources, segment)
        if source is None:
            return None, Decision(segment, None, "dense", "first")
        cache, node = source
        edge, forced = turn.edge(segment, node), turn.force.get(segment)
        if forced is False:
            return None, Decision(segment, edge, "dense", "forced")
        key = edge_key(edge)
        anchors = self.pool.compatible(edge.slot, key)
        rows = shared_prefix(len(cache), [anchor.length for anchor in anchors])
        eligible = [anchor for anchor in anchors if anchor.length >= rows]
        bases = [anchor.parts[self.base_key(key)].v for anchor in eligible]
        verdict = self._gate.judge(prefix_distances(cache.v, bases, rows), forced)
        if not verdict.accepted:
            return None, Decision(segment, edge, "dense", verdict.reason, verdict.entropy)
        used = tuple(eligible[i].request for i in verdict.used)
        fill = Fill(segment, cache, self.correction(cache, anchors, key, used))
        return fill, Decision(segment, edge, "correct", verdict.reason, verdict.entropy)

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
        cache, rows, key = source[0], turn.prompt.rows(segment), edge_key(edge)
        target = buffer.extract(rows)
        parts = {
            key: FactorPair(
                self._factorise(target.k[1:], self.rank_delta, minus=cache.k[1:]),
                self._factorise(target.v[1:], self.rank_delta, minus=cache.v[1:]),
            )
        }
        base = self.base_key(key)
        if base != BASE or self.pool.anchor(edge.slot, turn.request) is None:
            parts[base] = FactorPair(
                self._factorise(cache.k, self.rank_base), self._factorise(cache.v, self.rank_base)
            )
        self.pool.insert(edge.slot, turn.request, len(cache), parts, exact=buffer.exact(rows.stop))

    def _factorise(self, kv: Tensor, rank: int | None, minus: Tensor | None = None) -> Factors:
        return factorise(
            by_token(kv),
            rank,
            self.factorisation,
            self._generator,
            minus=None if minus is None else by_token(minus),
        )

    def base_key(self, edge: str) -> str:
        """Name of the part of an anchor that an edge's source is compared with."""
        return BASE if self.base == "shared" else f"{BASE}:{edge}"
