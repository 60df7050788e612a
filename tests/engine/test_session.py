"""One request through a workflow: who passes which cache to whom, references, clocks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import Buffer, SegmentCache
from kvcmas.engine.contract import (
    Decision,
    Fill,
    Held,
    Method,
    Plan,
    Sources,
    Turn,
    Wants,
)
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine, Session, TurnResult
from kvcmas.engine.workflow import (
    QUERY,
    Workflow,
    fan_in,
    fan_out,
    fully_connected,
    loop,
    sequential,
)
from kvcmas.errors import UserError
from kvcmas.method.kvcmas import KVCMAS
from tests.workflows import agent_prompt, random_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WORKFLOWS = {
    "sequential": sequential(4),
    "fully_connected": fully_connected(4),
    "loop": loop(2, 3),
    "fan_in": fan_in(4),
    "fan_out": fan_out(4),
}


@dataclass(frozen=True)
class Recorder(Method):
    """Another method, and what it was asked and given."""

    name: ClassVar[str] = "recorder"

    inner: Method = field(default_factory=FullShared)
    turns: list[Turn] = field(default_factory=list, init=False)
    given: dict[tuple[str, str, str], Held | None] = field(default_factory=dict, init=False)
    digests: dict[tuple[str, str, str], str] = field(default_factory=dict, init=False)

    @property
    def wants(self) -> Wants:
        return self.inner.wants

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        self.turns.append(turn)
        for i in turn.prompt.shared():
            key, held = (turn.request, turn.node, turn.prompt.slot(i)), sources.held(i)
            self.given[key] = held
            if held is not None:
                self.digests[key] = digest(held.cache)
        return self.inner.plan(turn, sources)

    def after_first_token(self, turn: Turn, sources: Sources, plan: Plan, buffer: Buffer) -> None:
        self.inner.after_first_token(turn, sources, plan, buffer)

    def source(self, node: str, slot: str, request: str = "r") -> Held:
        held = self.given[request, node, slot]
        assert held is not None
        return held


def digest(cache: SegmentCache) -> str:
    return hashlib.sha256(cache.k.numpy().tobytes() + cache.v.numpy().tobytes()).hexdigest()


def play(
    engine: Engine,
    workflow: Workflow,
    request: str = "r",
    *,
    seed: int = 10,
    force: Mapping[str, bool] | None = None,
    watch: Session | None = None,
) -> Iterator[TurnResult]:
    """Turn by turn, with outputs and observations that depend on ``seed`` only."""
    session = watch or engine.session(workflow, request)
    texts = {QUERY: random_ids(seed, 12)}
    for n, node in enumerate(workflow.nodes, 1):
        prompt, output = agent_prompt(workflow, node, texts), random_ids(seed + n, 3 + n % 4)
        forced = dict.fromkeys(prompt.shared(), force[node.name]) if force else {}
        yield session.run(
            node, prompt, max_new_tokens=0, output=output, force=forced, keep_buffer=True
        )
        texts |= {node.out_slot: output, node.obs_slot: random_ids(seed + 50 + n, 2 + n % 3)}


def expected_holder(workflow: Workflow, node: str, slot: str) -> str | None:
    """The previous consumer in static order, else the producer of an output."""
    before = workflow.consumers(slot)[: workflow.consumers(slot).index(node)]
    producers = [n.name for n in workflow.nodes if n.out_slot == slot]
    return before[-1] if before else next(iter(producers), None)


def rows_of(result: TurnResult, slot: str) -> range:
    """Where a slot stands in a turn: in its prompt, else its output."""
    for i in result.prompt.shared():
        if result.prompt.slot(i) == slot:
            return result.prompt.rows(i)
    return range(len(result.prompt), len(result.prompt) + len(result.output))


def buffer_of(result: TurnResult) -> Buffer:
    assert result.buffer is not None
    return result.buffer


# Who passes which cache to whom.


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=WORKFLOWS)
def test_the_source_is_the_last_users_cache(model: TransformersAdapter, workflow: Workflow) -> None:
    recorder = Recorder()
    results = {r.node: r for r in play(Engine(model, recorder), workflow)}
    transitions = 0
    for (_, node, slot), held in recorder.given.items():
        holder = expected_holder(workflow, node, slot)
        if holder is None:
            assert held is None
            continue
        transitions += 1
        assert held is not None
        assert held.node == holder
        rows, buffer = rows_of(results[holder], slot), buffer_of(results[holder])
        part = slice(rows.start, rows.stop)
        assert torch.equal(held.cache.k, model.rope.align(buffer.k[:, :, part], -rows.start))
        assert torch.equal(held.cache.v, buffer.v[:, :, part])
    consumed = sum(
        1
        for node in workflow.nodes
        for slot in workflow.consumes(node)
        if expected_holder(workflow, node.name, slot) is not None
    )
    assert transitions == consumed


def test_a_turn_knows_its_request_place_and_forced_decisions(model: TransformersAdapter) -> None:
    recorder, workflow = Recorder(), loop(2, 2)
    force = {node.name: n % 2 == 0 for n, node in enumerate(workflow.nodes)}
    results = list(play(Engine(model, recorder), workflow, "r7", force=force))
    assert [turn.request for turn in recorder.turns] == ["r7"] * 4
    assert [turn.node for turn in recorder.turns] == ["A0", "A1", "A0@2", "A1@2"]
    assert [turn.index for turn in recorder.turns] == [0, 1, 2, 3]
    for turn, result in zip(recorder.turns, results, strict=True):
        assert turn.prompt is result.prompt
        assert turn.force == dict.fromkeys(turn.prompt.shared(), force[turn.node])


@pytest.mark.parametrize(
    ("method", "action"),
    [(FullShared(), "reuse"), (KVCMAS(tau=1), "correct"), (KVCMAS(tau=0), "dense")],
    ids=["fullshared", "kvcmas", "kvcmas, all refused"],
)
@pytest.mark.parametrize("name", ["fully_connected", "fan_out", "loop"])
def test_sources_are_immutable(
    model: TransformersAdapter, method: Method, action: str, name: str
) -> None:
    """Corrections write into the target only, so parallel consumers do not disturb each other."""
    recorder = Recorder(inner=replace(method))
    engine, workflow = Engine(model, recorder), WORKFLOWS[name]
    for n in range(3):
        results = list(play(engine, workflow, f"r{n}", seed=100 * n))
    assert {d.action for r in results for d in r.decisions if d.edge} == {action}
    for key, before in recorder.digests.items():
        held = recorder.given[key]
        assert held is not None
        assert digest(held.cache) == before


def test_exact_means_that_nothing_approximate_went_into_it(model: TransformersAdapter) -> None:
    recorder, workflow = Recorder(), fully_connected(4)
    force = {"A0": True, "A1": True, "A2": False, "A3": True}
    list(play(Engine(model, recorder), workflow, force=force))
    assert recorder.source("A1", QUERY).exact
    assert recorder.source("A1", "out0").exact
    # A1 reused the query, which stands before everything it passes on.
    assert not recorder.source("A2", QUERY).exact
    assert not recorder.source("A2", "out1").exact
    # A2 was dense: the chain is reset, whatever came before.
    for slot in (QUERY, "out0", "obs0", "out1", "out2"):
        assert recorder.source("A3", slot).exact


def test_an_exact_prefix_stays_exact_before_a_reused_segment(model: TransformersAdapter) -> None:
    recorder, workflow = Recorder(), fully_connected(3)
    session, texts = Engine(model, recorder).session(workflow, "r"), {QUERY: random_ids(1, 9)}
    for node, force in zip(workflow.nodes, ({}, {1: False}, {}), strict=True):
        prompt = agent_prompt(workflow, node, texts)
        session.run(node, prompt, max_new_tokens=0, output=random_ids(2, 4), force=force)
        texts[node.out_slot] = random_ids(2, 4)
    assert recorder.source("A2", QUERY).exact
    assert not recorder.source("A2", "out0").exact


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=WORKFLOWS)
def test_slots_that_nobody_reads_again_are_forgotten(
    model: TransformersAdapter, workflow: Workflow
) -> None:
    engine = Engine(model, FullShared())
    session, order = engine.session(workflow, "r"), [node.name for node in workflow.nodes]
    lengths: dict[str, int] = {}
    for n, result in enumerate(play(engine, workflow, watch=session)):
        lengths |= {result.prompt.slot(i): len(result.prompt.rows(i)) for i in result.first_seen}
        lengths[workflow.nodes[n].out_slot] = len(result.output)
        later = {slot for slot in lengths if set(workflow.consumers(slot)) & {*order[n + 1 :]}}
        assert {slot for slot in lengths if session.held(slot) is not None} == later
        tokens = sum(lengths[slot] for slot in later)
        assert result.source_bytes == tokens * model.spec.kv_bytes_per_token
    assert result.source_bytes == 0


def test_a_method_that_wants_no_sources_gets_none(model: TransformersAdapter) -> None:
    recorder = Recorder(inner=NonShared())
    results = list(play(Engine(model, recorder), fully_connected(3)))
    assert set(recorder.given.values()) == {None}
    assert [result.source_bytes for result in results] == [0, 0, 0]


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=WORKFLOWS)
def test_first_seen_and_holders_do_not_depend_on_the_method(
    model: TransformersAdapter, workflow: Workflow
) -> None:
    seen = []
    warm = Engine(model, KVCMAS(tau=1))
    list(play(warm, workflow, "w0", seed=20))
    list(play(warm, workflow, "w1", seed=30))
    engines = [warm, *(Engine(model, m) for m in (NonShared(), FullShared(), KVCMAS(tau=0)))]
    for engine in engines:
        results = list(play(engine, workflow))
        seen.append([(r.node, r.prompt.sha256, r.first_seen, r.holders) for r in results])
    assert all(other == seen[0] for other in seen[1:])
    for node, _, first, holders in seen[0]:
        prompt = next(r.prompt for r in results if r.node == node)
        for i in prompt.shared():
            holder = expected_holder(workflow, node, prompt.slot(i))
            assert (i in first) == (holder is None)
            assert holders.get(i) == holder


@pytest.mark.parametrize("method", [NonShared(), FullShared()], ids=lambda m: m.name)
def test_a_slot_holds_the_same_ids_for_everyone(model: TransformersAdapter, method: Method) -> None:
    """Never re-tokenised: an edited query or output is noticed, under every method."""
    workflow = sequential(2)
    first, second = workflow.nodes
    q, out = random_ids(1, 6), random_ids(2, 4)
    session = Engine(model, method).session(workflow, "r")
    session.run(first, Prompt((ph(QUERY, q), pf([9]))), max_new_tokens=0, output=out)
    for other in ((ph(QUERY, q[1:]), ph("out0", out)), (ph(QUERY, q), ph("out0", out[:-1]))):
        with pytest.raises(ValueError, match=r"slot (q|out0) holds other tokens"):
            session.run(second, Prompt(other), max_new_tokens=0)
    # Another request starts afresh.
    again = Engine(model, method).session(workflow, "r2")
    again.run(first, Prompt((ph(QUERY, q[1:]), pf([9]))), max_new_tokens=0)


def test_contexts_longer_than_the_model_are_refused(hf: PreTrainedModel) -> None:
    adapter = TransformersAdapter(hf)
    adapter.spec = replace(adapter.spec, max_positions=20)
    workflow, prompt = sequential(1), Prompt((ph(QUERY, random_ids(1, 15)),))
    session = Engine(adapter, NonShared()).session(workflow, "r")
    session.run(workflow.nodes[0], prompt, max_new_tokens=5)
    with pytest.raises(UserError, match="15 prompt and 6 new tokens"):
        session.run(workflow.nodes[0], prompt, max_new_tokens=6)
    with pytest.raises(UserError, match="15 prompt and 6 new tokens"):
        session.run(workflow.nodes[0], prompt, max_new_tokens=0, output=[5] * 6)


# References and clocks.


@dataclass
class Clock:
    """Time that only moves when told to."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass(frozen=True)
class Referencing(Method):
    """Fills every PH with its context-free reference; says how long its two parts take."""

    name: ClassVar[str] = "referencing"

    background: bool = False
    clock: Clock = field(default_factory=Clock)

    @property
    def wants(self) -> Wants:
        return Wants(sources=False, background_reference=self.background)

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        self.clock.seconds += 5
        shared = list(turn.prompt.shared())
        fills = tuple(Fill(i, sources.reference(i)) for i in shared)
        decisions = tuple(Decision(i, turn.edge(i, "ref"), "reuse", "always") for i in shared)
        return Plan.make(turn.prompt, fills, decisions)

    def after_first_token(self, turn: Turn, sources: Sources, plan: Plan, buffer: Buffer) -> None:
        self.clock.seconds += 7


def test_a_reference_is_prefilled_and_charged_once_per_workflow(
    model: TransformersAdapter,
) -> None:
    engine = Engine(model, Referencing(), reference_prefix=[5, 6])
    workflow, charged, held = fully_connected(3), [], []
    for result in play(engine, workflow):
        prompt = result.prompt
        new = [len(prompt.rows(i)) for i in prompt.shared() if prompt.slot(i) not in held]
        held += [prompt.slot(i) for i in prompt.shared() if prompt.slot(i) not in held]
        # Each reference is its own prefill, prefix included.
        charged.append(result.accounting.reference_tokens)
        assert charged[-1] == sum(new) + 2 * len(new)
        tokens = sum(len(prompt.rows(i)) for i in prompt.shared())
        assert result.reference_bytes == tokens * model.spec.kv_bytes_per_token
        assert result.source_bytes == 0
    assert [r.accounting.reference_tokens for r in play(engine, workflow, "r2")] == charged


def test_a_reference_has_seen_the_prefix_only(model: TransformersAdapter) -> None:
    engine = Engine(model, Referencing(), reference_prefix=random_ids(7, 3))
    workflow = sequential(1)
    session = engine.session(workflow, "r")
    q = random_ids(1, 9)
    cache, tokens = session.reference(QUERY, q)
    alone = Prompt((pf(random_ids(7, 3)), ph(QUERY, q)))
    expected = engine.executor.run(alone, Plan.make(alone)).buffer.extract(alone.rows(1))
    assert tokens == 12
    assert torch.equal(cache.k, expected.k)
    assert torch.equal(cache.v, expected.v)
    again, tokens = session.reference(QUERY, q)
    assert again is cache
    assert tokens == 0


def test_background_references_are_not_charged(model: TransformersAdapter) -> None:
    results = list(play(Engine(model, Referencing(background=True)), fully_connected(3)))
    assert [r.accounting.reference_tokens for r in results] == [0, 0, 0]
    on_path = list(play(Engine(model, Referencing()), fully_connected(3)))
    for result, expected in zip(results, on_path, strict=True):
        assert torch.equal(result.first_logits, expected.first_logits)
        assert result.reference_bytes == expected.reference_bytes > 0


def test_times_add_up_on_a_fake_clock(model: TransformersAdapter) -> None:
    clock = Clock()
    engine = Engine(model, Referencing(clock=clock), clock=clock)
    for result in play(engine, fully_connected(2)):
        times = result.times
        assert (times.plan, times.prefill, times.build) == (5, 0, 7)
        assert (times.decode, times.capture) == (0, 0)
        assert (times.ttft, times.e2e) == (5, 12)


def test_the_buffer_is_handed_out_only_where_asked_for(model: TransformersAdapter) -> None:
    workflow = sequential(1)
    (asked,) = play(Engine(model, NonShared()), workflow)
    assert buffer_of(asked).length == len(asked.prompt) + len(asked.output)
    session = Engine(model, NonShared()).session(workflow, "r")
    assert session.run(workflow.nodes[0], asked.prompt, max_new_tokens=1).buffer is None


# Every agent goes on where the one before it stopped: source and target contexts are the same.


def converse(engine: Engine, request: str, seed: int) -> list[TurnResult]:
    workflow = fully_connected(3)
    session = engine.session(workflow, request)
    segments, results = [pf(random_ids(1, 6)), ph(QUERY, random_ids(seed, 9)), pf([7, 8])], []
    for node in workflow.nodes:
        output = random_ids(seed + 1 + node.agent, 5)
        prompt = Prompt(tuple(segments))
        results.append(session.run(node, prompt, max_new_tokens=0, output=output))
        segments += [ph(node.out_slot, output), pf(random_ids(2 + node.agent, 3))]
    return results


@pytest.mark.parametrize("method", [FullShared(), KVCMAS(tau=1)], ids=lambda m: m.name)
def test_identical_contexts_make_reuse_exact(model: TransformersAdapter, method: Method) -> None:
    engine = Engine(model, replace(method))
    for n in range(2):
        converse(engine, f"w{n}", 100 + 10 * n)
    results, truth = (converse(e, "r", 10) for e in (engine, Engine(model, NonShared())))
    reused = [d.action for d in results[-1].decisions]
    assert reused == ["reuse" if isinstance(method, FullShared) else "correct"] * 3
    for got, expected in zip(results, truth, strict=True):
        assert got.prompt.sha256 == expected.prompt.sha256
        torch.testing.assert_close(got.first_logits, expected.first_logits, atol=1e-3, rtol=0)
        torch.testing.assert_close(
            got.continuation_logits, expected.continuation_logits, atol=1e-3, rtol=0
        )


def test_the_first_turn_is_dense(model: TransformersAdapter) -> None:
    """Nobody holds anything yet: the first turn is NonShared's, bit by bit (DESIGN 5, rule 2)."""
    dense = next(play(Engine(model, NonShared()), fully_connected(2)))
    for method in (FullShared(), KVCMAS(tau=1)):
        engine = Engine(model, method)
        list(play(engine, fully_connected(2), "w", seed=30))
        first = next(play(engine, fully_connected(2)))
        assert torch.equal(first.first_logits, dense.first_logits)
        assert first.accounting == dense.accounting
