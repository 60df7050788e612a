"""GraphFlow as preconstructed correction: one delta per relation, calibrated and then only applied.

The KVCMAS paper's re-implementation of arXiv 2605.22566: a recurring relation (slot, target turn)
gets a delta against the context-free reference, and later requests take it without matching, gate
or update. It stands in for Kamera as well. Graph scheduling is left out.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from baselines.fullrank import Pair
from kvcmas.engine.cache import Buffer
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
    require_count,
)
from kvcmas.errors import UserError
from kvcmas.pool.anchors import REFERENCE


@dataclass(frozen=True)
class Relation:
    """Mean delta of the samples seen so far; never changed, only replaced.

    Attributes:
        mean: layers from 1; fp32 while calibrating, in the cache's dtype afterwards. Position u is
            averaged over the samples that reach it.
        count: samples per position, ``[tokens]``.
        samples: dense turns it was calibrated on.
        inexact: those of them whose prompt held an approximate entry before the segment.
        spread: squared deviations from the mean, summed over samples and entries.
        serial: a number that no other version of any relation ever gets.
    """

    mean: Pair
    count: Tensor
    samples: int
    inexact: int
    spread: float
    serial: int

    @property
    def rows(self) -> int:
        """Positions that a sample covers."""
        return len(self.mean)

    @property
    def variance(self) -> float:
        """Mean squared deviation per entry and sample from the mean delta."""
        layers, heads, _, dim = self.mean.k.shape
        return self.spread / (2 * layers * heads * dim * int(self.count.sum()))


@dataclass(frozen=True)
class MeanDelta:
    """A relation's delta on the first ``rows`` tokens; see the contract's ``Correction``."""

    rows: int
    mean: Pair

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add the delta of ``layer`` (from 1) in place."""
        k += self.mean.k[layer - 1, :, : self.rows].to(k.dtype)
        v += self.mean.v[layer - 1, :, : self.rows].to(v.dtype)


@dataclass(frozen=True)
class GraphFlow(Method):
    """Context-free reference plus the relation's preconstructed delta.

    A relation is calibrated on its first ``n_cal`` dense turns, whether they were forced (warm-up)
    or dense for want of a delta; until then it is dense, from then on fixed. Without a gate, reuse
    below 100% has to come from elsewhere: from a random share of the edges, which fits any ratio
    and tells nothing about quality, or from relations left dense, which is nearer to GraphFlow's
    pruning (:meth:`ranking` says which suffer most).

    Attributes:
        n_cal: calibration requests per relation.
        dense_share: probability that an edge of a request is dense all the same.
        seed: of that choice, which depends on request, slot and target only.
        dense_relations: relations, written ``slot>target``, that are always dense.
        sparsity: share of smallest magnitudes set to 0 in a finished delta, K and V apart; the
            original stores residuals sparsely. Storage here stays full.
        first_turn: is the first agent ``corrected`` or ``dense``.
        reference: is the reference prefill ``on_path`` or in the ``background``.
    """

    name: ClassVar[str] = "graphflow"

    n_cal: int = 8
    dense_share: float = 0.0
    seed: int = 0
    dense_relations: tuple[str, ...] = ()
    sparsity: float = 0.0
    first_turn: Literal["corrected", "dense"] = "corrected"
    reference: Literal["on_path", "background"] = "on_path"
    relations: dict[str, Relation] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("n_cal", self.n_cal, 1)
        for name in ("dense_share", "sparsity"):
            require_at_least(name, getattr(self, name), 0)
            if getattr(self, name) > 1:
                raise UserError(f"{name}={getattr(self, name)!r} must be at most 1")
        require_choice("first_turn", self.first_turn, ("corrected", "dense"))
        require_choice("reference", self.reference, ("on_path", "background"))
        if isinstance(self.dense_relations, str) or any(
            ">" not in relation for relation in self.dense_relations
        ):
            raise UserError(
                f"dense_relations={self.dense_relations!r} is not a list of slot>target names"
            )
        object.__setattr__(self, "dense_relations", tuple(self.dense_relations))

    @property
    def wants(self) -> Wants:
        """References only."""
        return Wants(
            sources=False,
            references=True,
            background_reference=self.reference == "background",
        )

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Correct every PH whose relation is calibrated."""
        fills, decisions = [], []
        for segment in turn.prompt.shared():
            if turn.index == 0 and self.first_turn == "dense":
                decisions.append(Decision(segment, None, "dense", "first"))
                continue
            edge, forced = turn.edge(segment, REFERENCE), turn.force.get(segment)
            relation = self.relations.get(_name(edge))
            reason = self._refusal(turn.request, _name(edge), relation, forced)
            if relation is None or reason:
                decisions.append(Decision(segment, edge, "dense", reason))
                continue
            cache = sources.reference(segment)
            rows = min(len(cache), relation.rows)
            fills.append(Fill(segment, cache, MeanDelta(rows, relation.mean)))
            accepted = "forced" if forced else "relation"
            decisions.append(Decision(segment, edge, "correct", accepted))
        return Plan.make(turn.prompt, tuple(fills), tuple(decisions))

    def after_first_token(self, turn: Turn, sources: Sources, plan: Plan, buffer: Buffer) -> None:
        """Calibrate on dense turns; a finished relation never changes."""
        for decision in plan.decisions:
            if decision.action != "dense" or decision.edge is None:
                continue
            name = _name(decision.edge)
            known = self.relations.get(name)
            if name in self.dense_relations or (known and known.samples >= self.n_cal):
                continue
            rows = turn.prompt.rows(decision.segment)
            target = buffer.extract(rows)
            delta = Pair.delta(target, sources.reference(decision.segment))
            serial = 1 + max((r.serial for r in self.relations.values()), default=-1)
            relation = _update(known, delta, buffer.exact(rows.stop), serial)
            if relation.samples == self.n_cal:
                mean = relation.mean
                relation = replace(
                    relation,
                    mean=Pair(
                        _sparse(mean.k, self.sparsity).to(target.k.dtype),
                        _sparse(mean.v, self.sparsity).to(target.v.dtype),
                    ),
                )
            self.relations[name] = relation

    def ranking(self) -> list[tuple[str, float]]:
        """Relations and their calibration variance, the least reproducible first."""
        pairs = ((name, relation.variance) for name, relation in self.relations.items())
        return sorted(pairs, key=lambda pair: -pair[1])

    def state(self) -> State:
        """Every relation; a new version is a new entry."""
        state = State({"method": self.name, "relations": {}})
        for name, relation in self.relations.items():
            state.meta["relations"][name] = {
                "samples": relation.samples,
                "inexact": relation.inexact,
                "spread": relation.spread,
                "serial": relation.serial,
            }
            entry = {**relation.mean.tensors(), "count": relation.count}
            state.entries[str(relation.serial)] = entry
        return state

    def load_state(self, state: State) -> None:
        """See :meth:`Method.load_state`."""
        if state.meta.get("method") != self.name:
            raise ValueError(f"not a state of {self.name}: {state.meta.get('method')}")
        self.relations.clear()
        for name, meta in state.meta["relations"].items():
            entry = state.entries[str(meta["serial"])]
            self.relations[name] = Relation(Pair.from_tensors(entry), entry["count"], **meta)

    def _refusal(
        self, request: str, name: str, relation: Relation | None, forced: bool | None
    ) -> str:
        """Why this edge is dense; empty if it is not."""
        if forced is False:
            return "forced"
        if relation is None:
            return "unknown"
        if forced:
            return ""
        if name in self.dense_relations:
            return "pruned"
        if relation.samples < self.n_cal:
            return "calibrating"
        return "share" if _chance(self.seed, request, name) < self.dense_share else ""


def _name(edge: Edge) -> str:
    return f"{edge.slot}>{edge.target}"


def _chance(seed: int, request: str, name: str) -> float:
    """A number in [0, 1) that depends on nothing but the arguments: no order, no process."""
    digest = hashlib.sha256(f"{seed}/{request}/{name}".encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64


def _update(known: Relation | None, delta: Pair, exact: bool, serial: int) -> Relation:
    """The relation with one more sample (Welford's running mean, per position)."""
    if known is None:
        empty = delta.k.new_empty(0, dtype=torch.long)
        start = Pair(*(x[:, :, :0].float() for x in (delta.k, delta.v)))
        known = Relation(start, empty, 0, 0, 0.0, serial)
    rows = max(len(delta), known.rows)
    count = _grown(known.count, rows, 0)
    count[: len(delta)] += 1
    spread, means = known.spread, []
    for before, sample in ((known.mean.k, delta.k), (known.mean.v, delta.v)):
        mean = _grown(before, rows, 2)
        part = mean[:, :, : len(delta)]
        deviation = sample.float() - part
        part += deviation / count[: len(delta), None]
        spread += float((deviation * (sample.float() - part)).sum(dtype=torch.float64))
        means.append(mean)
    return Relation(
        Pair(*means), count, known.samples + 1, known.inexact + (not exact), spread, serial
    )


def _grown(x: Tensor, rows: int, dim: int) -> Tensor:
    """A copy of ``x`` with zeros behind it, ``rows`` long in ``dim``."""
    shape = list(x.shape)
    shape[dim] = rows
    grown = x.new_zeros(shape)
    grown.narrow(dim, 0, x.shape[dim]).copy_(x)
    return grown


def _sparse(mean: Tensor, share: float) -> Tensor:
    """``mean`` with its ``share`` of smallest magnitudes set to 0."""
    dropped = round(share * mean.numel())
    if not dropped:
        return mean
    threshold = mean.abs().flatten().kthvalue(dropped).values
    return mean.where(mean.abs() > threshold, 0.0)
