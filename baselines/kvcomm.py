"""KVComm: online anchors of full-dimensional caches and deltas (arXiv 2510.12872).

The headline settings follow the KVCMAS paper's account of it: a context-free reference for every
PH, one decision per PH, PF executed. ``KVComm.faithful()`` are those of the public implementation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

from baselines.fullrank import Pair, WeightedDeltas, token_weights, value_distances
from baselines.kvcomm_prefix import PrefixOffsets
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
    require_count,
)
from kvcmas.errors import UserError
from kvcmas.pool.anchors import BASE, REFERENCE, Anchor, AnchorPool, CapacityRule, edge_key
from kvcmas.pool.gate import Gate, Verdict


@dataclass(frozen=True)
class _Case:
    """One PH of a prompt: its verdict, and what it would be corrected from and with."""

    segment: int
    edge: Edge
    cache: SegmentCache
    anchors: Sequence[Anchor[Pair]]
    verdict: Verdict


@dataclass(frozen=True)
class KVComm(Method):
    """Base plus anchor-weighted full-rank delta where the gate accepts, dense where it does not.

    An anchor is eligible if it holds this consumer's delta and at least as many tokens as the PH;
    the gate compares all eligible anchors and the correction uses them all. Anchors of PH that
    follow a corrected one in their prompt are kept, marked as inexact.

    Attributes:
        gamma: threshold on the normalised entropy; higher reuses more.
        capacity: V, anchors per slot. With 1 the gate is bypassed.
        temperature: of the gate's and the weights' softmax.
        window: how many of the oldest anchors compete for eviction.
        capacity_rule: ``strict`` holds V anchors, ``authors`` V + 1 (the public code).
        top_p_quirk: an accepted reuse counts for all eligible anchors where the most similar one
            alone reaches the top 0.9 of the scores, as in the public code; else for that one.
        gate_scope: does each ``slot`` decide for itself, or is the whole ``prompt`` dense as soon
            as one of its PH is refused (the public code; only the refused ones become anchors).
        base: what a PH is corrected from. ``reference`` is its context-free cache; ``producer``
            takes an agent's output as its own decoding left it (the public code).
        prefixes: what happens to PF. ``policy`` leaves them to ``pf_policy``; ``offset`` serves
            them from the agent's first dense prompt, plus the anchors' PF deltas (the public code,
            whose prompt for that holds marker texts in place of the PH).
        first_turn: is the first agent ``corrected`` or ``dense``.
        reference: is the reference prefill ``on_path`` or in the ``background``.
        in_flight: ``base=producer`` only: requests whose outputs are remembered at a time.
    """

    name: ClassVar[str] = "kvcomm"

    gamma: float = 0.3
    capacity: int = 20
    temperature: float = 1.0
    window: int = 5
    capacity_rule: CapacityRule = "strict"
    top_p_quirk: bool = True
    gate_scope: Literal["slot", "prompt"] = "slot"
    base: Literal["reference", "producer"] = "reference"
    prefixes: Literal["policy", "offset"] = "policy"
    first_turn: Literal["corrected", "dense"] = "corrected"
    reference: Literal["on_path", "background"] = "on_path"
    in_flight: int = 16
    pool: AnchorPool[Pair] = field(init=False, repr=False, compare=False)
    _gate: Gate = field(init=False, repr=False, compare=False)
    _offsets: PrefixOffsets = field(init=False, repr=False, compare=False)
    _outputs: OrderedDict[str, dict[str, SegmentCache]] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("gamma", self.gamma, 0)
        for name in ("capacity", "window", "in_flight"):
            require_count(name, getattr(self, name), 1)
        if not self.temperature > 0:
            raise UserError(f"temperature={self.temperature!r} must be positive")
        require_choice("capacity_rule", self.capacity_rule, get_args(CapacityRule))
        require_choice("gate_scope", self.gate_scope, ("slot", "prompt"))
        require_choice("base", self.base, ("reference", "producer"))
        require_choice("prefixes", self.prefixes, ("policy", "offset"))
        require_choice("first_turn", self.first_turn, ("corrected", "dense"))
        require_choice("reference", self.reference, ("on_path", "background"))
        if self.prefixes == "offset" and self.gate_scope != "prompt":
            raise UserError("prefixes='offset' needs gate_scope='prompt': PF and PH go together")
        if self.prefixes == "offset" and self.pf_policy != "dense":
            raise UserError(f"prefixes='offset' serves PF itself; pf_policy={self.pf_policy!r}")
        gate = Gate(self.gamma, self.temperature, self.capacity == 1, self.top_p_quirk)
        object.__setattr__(self, "pool", AnchorPool(self.capacity, self.window, self.capacity_rule))
        object.__setattr__(self, "_gate", gate)
        object.__setattr__(self, "_offsets", PrefixOffsets())
        object.__setattr__(self, "_outputs", OrderedDict())

    @classmethod
    def faithful(cls) -> KVComm:
        """The public implementation's settings, on canonical keys."""
        return cls(capacity_rule="authors", gate_scope="prompt", base="producer", prefixes="offset")

    @property
    def wants(self) -> Wants:
        """References; the producers' caches only where they are the base."""
        return Wants(
            sources=self.base == "producer",
            references=True,
            background_reference=self.reference == "background",
        )

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        """Gate every PH, then correct what was accepted.

        Raises:
            UserError: ``base=producer`` and an output that is not remembered any more.
        """
        shared = tuple(turn.prompt.shared())
        if turn.index == 0 and self.first_turn == "dense":
            decisions = tuple(Decision(i, None, "dense", "first") for i in shared)
            return Plan.make(turn.prompt, decisions=decisions)
        cases = [self._judge(turn, sources, i) for i in shared]
        whole = all(case.verdict.accepted for case in cases)
        if self.gate_scope == "prompt" and not whole:
            cases = [_as_part_of_prompt(case) for case in cases]
        accepted = [case for case in cases if case.verdict.accepted]
        fills = [self._fill(case) for case in accepted]
        if self.prefixes == "offset" and whole:
            anchors = {case.segment: (case.cache, case.anchors) for case in accepted}
            fills += self._offsets.fills(turn, anchors, self.temperature)
        decisions = tuple(
            Decision(
                case.segment,
                case.edge,
                "correct" if case.verdict.accepted else "dense",
                case.verdict.reason,
                case.verdict.entropy,
            )
            for case in cases
        )
        return Plan.make(turn.prompt, tuple(fills), decisions)

    def after_first_token(self, turn: Turn, sources: Sources, plan: Plan, buffer: Buffer) -> None:
        """Count accepted reuse; make anchors of refused PH, never of accepted corrections."""
        for fill in plan.fills:
            if isinstance(fill.correction, WeightedDeltas):
                self.pool.use(turn.prompt.slot(fill.segment), fill.correction.used)
        if self.prefixes == "offset" and not plan.fills:
            self._offsets.learn(turn, buffer)
        for decision in plan.decisions:
            refused = decision.action == "dense" and decision.reason != "prompt"
            if refused and decision.edge is not None:
                self._learn(turn, sources, decision.segment, decision.edge, buffer)

    def state(self) -> State:
        """The pool and the PF templates; caches of requests in flight are no learned state."""
        state, offsets = self.pool.state(), self._offsets.state()
        state.meta |= {"method": self.name, "prefixes": offsets.meta}
        state.entries |= {f"pf-{name}": entry for name, entry in offsets.entries.items()}
        return state

    def load_state(self, state: State) -> None:
        """See :meth:`Method.load_state`."""
        if state.meta.get("method") != self.name:
            raise ValueError(f"not a state of {self.name}: {state.meta.get('method')}")
        self.pool.load_state(state, Pair.from_tensors)
        offsets = {k.removeprefix("pf-"): v for k, v in state.entries.items() if k[:3] == "pf-"}
        self._offsets.load_state(State(state.meta["prefixes"], offsets))

    def _judge(self, turn: Turn, sources: Sources, segment: int) -> _Case:
        edge, forced = turn.edge(segment, REFERENCE), turn.force.get(segment)
        cache = self._base(turn, sources, segment)
        compatible = self.pool.compatible(edge.slot, edge_key(edge))
        anchors = [anchor for anchor in compatible if anchor.length >= len(cache)]
        if forced is False:
            return _Case(segment, edge, cache, anchors, Verdict(False, "forced"))
        distances = value_distances(cache.v, [anchor.parts[BASE] for anchor in anchors])
        verdict = self._gate.judge(distances, forced)
        if verdict.reason == "cold" and len(anchors) < min(2, len(compatible)):
            verdict = Verdict(False, "length")
        return _Case(segment, edge, cache, anchors, verdict)

    def _fill(self, case: _Case) -> Fill:
        bases = [anchor.parts[BASE] for anchor in case.anchors]
        correction = WeightedDeltas(
            rows=len(case.cache),
            weights_k=token_weights(case.cache.k, [base.k for base in bases], self.temperature),
            weights_v=token_weights(case.cache.v, [base.v for base in bases], self.temperature),
            deltas=[anchor.parts[edge_key(case.edge)] for anchor in case.anchors],
            used=tuple(case.anchors[i].request for i in case.verdict.used),
        )
        return Fill(case.segment, case.cache, correction)

    def _base(self, turn: Turn, sources: Sources, segment: int) -> SegmentCache:
        slot = turn.prompt.slot(segment)
        if self.base == "reference" or not slot.startswith("out"):
            return sources.reference(segment)
        outputs = self._outputs.setdefault(turn.request, {})
        self._outputs.move_to_end(turn.request)
        if len(self._outputs) > self.in_flight:
            self._outputs.popitem(last=False)
        held = sources.held(segment)
        # Later consumers leave their own cache in the producer's place.
        if held is not None and held.node == slot.replace("out", "A", 1):
            outputs[slot] = held.cache
        if slot not in outputs:
            raise UserError(
                f"base='producer': {slot} of request {turn.request} is not remembered any more;"
                f" in_flight={self.in_flight} is too small"
            )
        return outputs[slot]

    def _learn(
        self, turn: Turn, sources: Sources, segment: int, edge: Edge, buffer: Buffer
    ) -> None:
        cache, rows = self._base(turn, sources, segment), turn.prompt.rows(segment)
        parts = {edge_key(edge): Pair.delta(buffer.extract(rows), cache)}
        if self.pool.anchor(edge.slot, turn.request) is None:
            parts[BASE] = Pair(cache.k, cache.v)
        if self.prefixes == "offset":
            parts |= self._offsets.deltas(turn, segment, buffer)
        self.pool.insert(edge.slot, turn.request, len(cache), parts, exact=buffer.exact(rows.stop))


def _as_part_of_prompt(case: _Case) -> _Case:
    """The case in a prompt that is executed as a whole."""
    if not case.verdict.accepted:
        return case
    return replace(case, verdict=Verdict(False, "prompt", case.verdict.entropy))
