"""Bytes that a method needs on a model, by category, counted from lengths: nothing is run.

Everything is counted as it is stored, with full pools whose anchors are as long as this workflow's
segments. Tests compare the categories with what real runs hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcmas.engine.adapter import ModelSpec
from kvcmas.engine.contract import Method
from kvcmas.engine.workflow import QUERY, Node, Workflow, loop
from kvcmas.errors import UserError
from repro.runners.serving.budgets import context_free
from traces.generator import LayoutName, Lengths
from traces.schema import TraceWorkflow


@dataclass(frozen=True)
class TurnShape:
    """Lengths of one turn, in tokens.

    Attributes:
        own: agent-specific tokens of the prompt.
        shared: PH of the prompt as ``(slot, tokens)``, none of them empty.
        output: tokens generated into ``out_slot``.
    """

    out_slot: str
    own: int
    shared: tuple[tuple[str, int], ...]
    output: int

    @property
    def rows(self) -> int:
        """Rows of the turn's buffer: prompt and output."""
        return self.own + sum(tokens for _, tokens in self.shared) + self.output


@dataclass(frozen=True)
class Slot:
    """One shared slot of a workflow: its tokens, and the edges that anchors are made of.

    Attributes:
        chained: transitions from one holder to the next.
        first: readings from a context-free reference by the first turn of the workflow.
        later: those by later turns.
    """

    tokens: int
    chained: int
    first: int
    later: int


@dataclass(frozen=True)
class PoolBytes:
    """A full pool: what anchors are matched by, and what they add."""

    base: int = 0
    delta: int = 0

    @property
    def total(self) -> int:
        """Bytes of the pool, as its state holds them."""
        return self.base + self.delta


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes by category.

    Attributes:
        active: K and V of the longest turn's buffer, and the residual rows captured beside them.
        sources: source caches of one workflow after the turn that leaves most of them.
        pool: of a process, at capacity.
        references: context-free references of one workflow.
        transient: arrays held while the anchor of one PH is made, beyond what it leaves.
    """

    weights: int
    active: int
    sources: int
    pool: PoolBytes
    references: int
    transient: int

    @property
    def held(self) -> int:
        """Everything but what anchor building holds for a moment."""
        return self.weights + self.active + self.sources + self.pool.total + self.references

    @property
    def total(self) -> int:
        """All categories: an upper bound, because they need not peak in the same turn."""
        return self.held + self.transient


def shapes_of(workflow: TraceWorkflow) -> tuple[TurnShape, ...]:
    """Lengths of a workflow of a trace."""
    return tuple(
        TurnShape(
            turn.node.out_slot,
            sum(len(s.ids) for s in turn.segments if s.slot is None),
            tuple((s.slot, len(s.ids)) for s in turn.segments if s.slot is not None and s.ids),
            len(turn.output),
        )
        for turn in workflow.turns
    )


def layout_graph(layout: LayoutName, agents: int, rounds: int) -> Workflow:
    """Who reads what: ``T`` fully connected, round by round; in ``L0`` all read the query only.

    Raises:
        UserError: no agent or no round.
    """
    for name, value in (("agents", agents), ("rounds", rounds)):
        if value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    if layout == "T":
        return loop(agents, rounds)
    nodes = (Node(a, r) for r in range(1, rounds + 1) for a in range(agents))
    return Workflow("shared_query", tuple(nodes))


def layout_turns(lengths: Lengths, graph: Workflow) -> tuple[TurnShape, ...]:
    """Lengths of a workflow in a generated layout."""
    turns = []
    for node in graph.nodes:
        outputs = [(graph[parent].out_slot, lengths.output) for parent in node.parents]
        own = lengths.system + lengths.private + lengths.glue * len(outputs) + lengths.tail
        shared = ((QUERY, lengths.shared), *outputs)
        turns.append(TurnShape(node.out_slot, own, shared, lengths.output))
    return tuple(turns)


def slots(turns: Sequence[TurnShape]) -> dict[str, Slot]:
    """Shared slots of a workflow, by name."""
    found: dict[str, Slot] = {}
    outputs = {turn.out_slot for turn in turns}
    for position, turn in enumerate(turns):
        for name, tokens in turn.shared:
            known = found.get(name)
            held = known is not None or name in outputs
            known = known or Slot(tokens, 0, 0, 0)
            found[name] = Slot(
                known.tokens,
                known.chained + held,
                known.first + (position == 0),
                known.later + (position > 0),
            )
    return found


def pool_bytes(method: Method, turns: Sequence[TurnShape], spec: ModelSpec) -> PoolBytes:
    """A method's full pool for workflows of these lengths; empty for one that keeps none."""
    base = delta = 0
    for slot, edges in _learned(method, turns):
        pool = _slot_pool(method, slot.tokens, edges, spec)
        base, delta = base + pool.base, delta + pool.delta
    return PoolBytes(base, delta)


def active_bytes(method: Method, turns: Sequence[TurnShape], spec: ModelSpec) -> int:
    """The longest turn's buffer."""
    return max(turn.rows for turn in turns) * (spec.kv_bytes_per_token + _residual(method, spec))


def source_bytes(method: Method, turns: Sequence[TurnShape], spec: ModelSpec) -> list[int]:
    """Source caches after each turn: those that a later turn reads."""
    per_token = spec.kv_bytes_per_token + _residual(method, spec)
    per_token += 4 if method.wants.received else 0  # one fp32 sum
    held: dict[str, int] = {}
    totals = []
    for position, turn in enumerate(turns):
        read_later = {name for later in turns[position + 1 :] for name, _ in later.shared}
        for name, tokens in (*turn.shared, (turn.out_slot, turn.output)):
            if name in read_later:
                held[name] = tokens
            else:
                held.pop(name, None)
        totals.append(sum(held.values()) * per_token if method.wants.sources else 0)
    return totals


def reference_bytes(method: Method, turns: Sequence[TurnShape], spec: ModelSpec) -> list[int]:
    """Context-free references after each turn; a workflow keeps those it has asked for."""
    asked: dict[str, int] = {}
    totals = []
    for position, turn in enumerate(turns):
        unasked = position == 0 and not method.wants.background_reference
        unasked = unasked and method.settings().get("first_turn") == "dense"
        if method.wants.references and not unasked:
            asked.update(turn.shared)
        totals.append(sum(asked.values()) * spec.kv_bytes_per_token)
    return totals


def transient_bytes(method: Method, turns: Sequence[TurnShape], spec: ModelSpec) -> int:
    """Arrays held while one anchor is made, for the PH that takes most, beyond what it leaves.

    The target's copy, its keys rotated to start 0, stays while the method learns from it. Workspace
    inside LAPACK is not known and not counted.
    """
    most = 0
    for slot, _ in _learned(method, turns):
        cache = slot.tokens * spec.kv_bytes_per_token
        learning = cache
        if method.name == "kvcmas":
            kinds = ("rank_delta", "rank_base")
            learning += max(
                _factorising(method.settings(), kind, slot.tokens, spec) for kind in kinds
            )
        elif method.name == "graphflow":
            # The difference to the source; then three arrays the size of the mean of K or V.
            in_fp32 = cache // 2 // spec.dtype.itemsize * 4
            learning += cache + 3 * (in_fp32 // spec.layers * (spec.layers - 1))
        most = max(most, learning)
    return most


def memory_bytes(
    method: Method, turns: Sequence[TurnShape], spec: ModelSpec, weights: int
) -> MemoryBytes:
    """All categories.

    Raises:
        UserError: settings whose bytes are not counted here.
    """
    _check_counted(method)
    return MemoryBytes(
        weights=weights,
        active=active_bytes(method, turns, spec),
        sources=max(source_bytes(method, turns, spec)),
        pool=pool_bytes(method, turns, spec),
        references=max(reference_bytes(method, turns, spec)),
        transient=transient_bytes(method, turns, spec),
    )


def _check_counted(method: Method) -> None:
    settings = method.settings()
    if method.pf_policy != "dense":
        raise UserError(f"pf_policy={method.pf_policy!r}: the store of prefixes is not counted")
    if settings.get("prefixes") == "offset" or settings.get("base") == "producer":
        raise UserError("kvcomm: base='producer' and prefixes='offset' are not counted")
    stateful = type(method).load_state is not Method.load_state
    if stateful and method.name not in ("kvcmas", "kvcomm", "graphflow"):
        raise UserError(f"{method.name}: what it stores is not known here")


def _learned(method: Method, turns: Sequence[TurnShape]) -> list[tuple[Slot, int]]:
    """Slots that a method learns about, with the edges an anchor holds."""
    if method.name not in ("kvcmas", "kvcomm", "graphflow"):
        return []
    found = []
    for slot in slots(turns).values():
        edges = slot.chained
        if context_free(method):
            corrected = method.settings()["first_turn"] == "corrected"
            edges = slot.later + (slot.first if corrected else 0)
        if edges:
            found.append((slot, edges))
    return found


def _slot_pool(method: Method, tokens: int, edges: int, spec: ModelSpec) -> PoolBytes:
    settings, row = method.settings(), spec.kv_bytes_per_token // spec.layers
    if method.name == "graphflow":
        # One mean per relation, in fp32 until it is finished, and a count per position.
        row = row // spec.dtype.itemsize * max(4, spec.dtype.itemsize)
        return PoolBytes(delta=edges * tokens * ((spec.layers - 1) * row + 8))
    anchors = settings["capacity"] + (settings["capacity_rule"] == "authors")
    if method.name == "kvcomm":
        base, delta = spec.layers * tokens * row, (spec.layers - 1) * tokens * row
        return PoolBytes(anchors * base, anchors * edges * delta)
    bases = edges if settings["base"] == "per_edge" else 1
    base = _factors(tokens, settings["rank_base"], spec.layers, spec)
    delta = _factors(tokens, settings["rank_delta"], spec.layers - 1, spec)
    return PoolBytes(anchors * bases * base, anchors * edges * delta)


def _factors(tokens: int, rank: int | None, layers: int, spec: ModelSpec) -> int:
    """Factors of K and of V: tokens x r and r x D, per layer."""
    width = spec.kv_heads * spec.head_dim
    effective = min(rank or width, tokens, width)
    return 2 * layers * effective * (tokens + width) * spec.dtype.itemsize


def _factorising(settings: Mapping[str, Any], kind: str, tokens: int, spec: ModelSpec) -> int:
    """Most bytes that ``factorise`` holds at once beside the factors: those of one layer.

    ``kind`` is the setting with the rank.
    """
    width, item = spec.kv_heads * spec.head_dim, spec.dtype.itemsize
    rank = min(settings[kind] or width, tokens, width)
    rows = 4 * tokens * width
    # A difference, and rows made contiguous, where those in fp32 are not the same.
    converting = tokens * width * item * ((kind == "rank_delta") + (item != 4))
    left, right = 4 * tokens * rank, 4 * rank * width
    if settings["factorisation"] == "randomised":
        return rows + max(converting, 3 * left + right + 4 * rank * rank)
    side = min(tokens, width)
    # A Gram matrix and its eigenvectors in fp64; for short PH also a basis and the rows inside it.
    gram = 16 * side * side + 8 * side
    span = 4 * (width * side + tokens * side) if tokens < width else 0
    return rows + max(converting, span + gram, left + right)


def _residual(method: Method, spec: ModelSpec) -> int:
    """Bytes of captured residual rows of one token."""
    return len(set(method.wants.hidden_layers)) * spec.hidden * spec.dtype.itemsize
