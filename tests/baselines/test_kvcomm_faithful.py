"""KVComm as the public code runs it: whole prompts, producers' caches, PF offsets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baselines.fullrank import Pair
from baselines.kvcomm import KVComm
from baselines.kvcomm_prefix import prefixes
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Plan, State, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine
from kvcmas.errors import UserError
from kvcmas.pool.anchors import BASE
from tests.replay import WORKFLOW, Truth, dense, replayed
from tests.workflows import FixedSources

EDGE = "ref>A1"


@pytest.fixture(scope="module")
def truth(executor: Executor) -> Truth:
    """Dense results of the request that is served."""
    return dense(executor.model, 5)


def test_one_refused_ph_makes_the_whole_prompt_dense(executor: Executor, truth: Truth) -> None:
    method = KVComm(gamma=1, gate_scope="prompt")
    engine = Engine(executor.model, method)
    for request in ("warm0", "warm1"):
        replayed(engine, truth, request)
    result = replayed(engine, truth, "r", {("A1", 3): False}, nodes=2)["A1"]
    assert [(d.action, d.reason) for d in result.decisions] == [
        ("dense", "prompt"),
        ("dense", "forced"),
    ]
    torch.testing.assert_close(result.first_logits, truth["A1"].first_logits, atol=1e-4, rtol=0)
    assert method.pool.anchor("q", "r") is None
    assert method.pool.anchor("out0", "r") is not None


def test_base_of_outputs_is_the_producers_own_cache(executor: Executor, truth: Truth) -> None:
    """For every consumer, not only for the first one, who still finds it in shared memory."""
    method = KVComm(base="producer")
    replayed(Engine(executor.model, method), truth, "r")
    prompt, output = truth["A0"].prompt, truth["A0"].output
    run = executor.run(prompt, Plan.make(prompt), new_tokens=len(output))
    executor.extend(run.buffer, output)
    own = run.buffer.extract(range(len(prompt), len(prompt) + len(output)))
    anchor = method.pool.anchor("out0", "r")
    assert anchor is not None
    torch.testing.assert_close(anchor.parts[BASE].k, own.k, atol=1e-5, rtol=0)
    for node in ("A1", "A3"):
        prompt = truth[node].prompt
        run = executor.run(prompt, Plan.make(prompt))
        target = run.buffer.extract(prompt.rows(3))
        delta = anchor.parts[f"ref>{node}"]
        torch.testing.assert_close(delta.v, (target.v - own.v)[1:], atol=1e-5, rtol=0)


def test_a_forgotten_output_is_an_error_and_no_wrong_base(executor: Executor, truth: Truth) -> None:
    engine = Engine(executor.model, KVComm(base="producer", in_flight=1))
    sessions = {name: engine.session(WORKFLOW, name) for name in ("a", "b")}
    for node in WORKFLOW.nodes[:2]:
        for session in sessions.values():
            result = truth[node.name]
            session.run(node, result.prompt, max_new_tokens=0, output=result.output)
    with pytest.raises(UserError, match="out0 of request a is not remembered any more"):
        sessions["a"].run(WORKFLOW.nodes[2], truth["A2"].prompt, max_new_tokens=0)


def test_prefix_offsets_serve_pf_from_template_and_anchors(
    executor: Executor, truth: Truth
) -> None:
    method = replace(KVComm.faithful(), gamma=1)
    engine = Engine(executor.model, method)
    others = [dense(executor.model, 70 + n) for n in range(2)]
    for n, other in enumerate(others):
        replayed(engine, other, f"w{n}")
    results = replayed(engine, truth, "r")
    entries = results["A1"].accounting.prompt
    assert entries.executed == 4  # the last row
    assert entries.corrected > 0
    # The PF in front of everything is exact, so reused as it is; layer 0 of all other rows as well.
    system = len(truth["A1"].prompt.segments[0])
    assert entries.reused == 4 * system + (len(truth["A1"].prompt) - system - 1)


def test_an_anchor_holds_the_offsets_of_the_pf_behind_its_ph(
    executor: Executor, truth: Truth
) -> None:
    method = KVComm.faithful()
    replayed(Engine(executor.model, method), truth, "r")
    for slot, anchor in method.pool:
        expected = set()
        for node, result in truth.items():
            owned = result.prompt.segments
            owners = {i for i in result.prompt.shared() if owned[i].slot == slot}
            turn = Turn("r", node, 0, result.prompt)
            expected |= {p.key for p in prefixes(turn) if p.owner in owners}
        assert {name for name in anchor.parts if ">" not in name and name != BASE} == expected
    assert len(method.state().meta["prefixes"]["templates"]) == sum(
        segment.kind == "PF" for result in truth.values() for segment in result.prompt.segments
    )


def test_a_pf_is_known_by_everything_of_its_agent_before_it() -> None:
    glue, tail = pf([3, 4]), pf([5])
    prompts = [Prompt((system, ph("q", [1]), glue, tail)) for system in (pf([7]), pf([8]))]
    turns = [Turn("r", "A1", 1, prompts[0]), Turn("r", "A1", 1, prompts[1])]
    turns.append(Turn("r", "A2", 1, prompts[0]))
    keys = [prefix.key for turn in turns for prefix in prefixes(turn)]
    assert len(set(keys)) == len(keys) == 9
    assert [(p.segment, p.owner) for p in prefixes(turns[0])] == [(0, None), (2, 1), (3, 1)]


def test_templates_come_from_prompts_that_were_executed_as_a_whole(
    executor: Executor, truth: Truth
) -> None:
    method = replace(KVComm.faithful(), gamma=1)
    engine = Engine(executor.model, method)
    for request in ("warm0", "warm1"):
        replayed(engine, truth, request)
    known = method.state().meta["prefixes"]
    segments = truth["A0"].prompt.segments
    other = Prompt((*segments[:-1], pf([7, 8, 9])))
    result = engine.session(WORKFLOW, "r").run(WORKFLOW.nodes[0], other, max_new_tokens=0)
    assert [d.action for d in result.decisions] == ["correct"]
    assert result.accounting.prompt.executed == 4 * 3  # the PF without a template
    assert method.state().meta["prefixes"] == known


def test_prefix_correction_is_the_weighted_sum_of_the_anchors_offsets(executor: Executor) -> None:
    """Weights by Euclidean distance along the tokens, per layer, head and channel."""
    model = executor.model
    rng = torch.Generator().manual_seed(0)
    shape = (model.spec.layers, model.spec.kv_heads, 6, model.spec.head_dim)
    method = KVComm.faithful()
    longer = (*shape[:2], 9, shape[3])  # the last 6 of its tokens are compared
    caches = [torch.randn(2, *each, generator=rng) for each in (shape, longer)]
    offsets = [torch.randn(2, shape[0] - 1, shape[1], 3, shape[3], generator=rng) for _ in range(2)]
    template = torch.randn(2, shape[0], shape[1], 3, shape[3], generator=rng)
    prompt = Prompt((ph("q", [5] * 6), pf([6, 7, 8])))
    turn = Turn("r", "A1", 1, prompt)
    method.load_state(_with_template(method, turn, template))
    key = next(iter(method.state().meta["prefixes"]["templates"]))
    for n, (cache, offset) in enumerate(zip(caches, offsets, strict=True)):
        parts = {BASE: Pair(*cache), EDGE: Pair(*(c[1:] for c in cache)), key: Pair(*offset)}
        method.pool.insert("q", f"r{n}", cache.shape[3], parts, exact=True)
    current = torch.randn(2, *shape, generator=rng)
    sources = FixedSources(references={0: SegmentCache(*current)})
    plan = method.plan(replace(turn, force={0: True}), sources)
    (fill,) = (fill for fill in plan.fills if fill.segment == 1)
    assert fill.correction is not None
    got = fill.cache.k.clone(), fill.cache.v.clone()
    for layer in range(1, shape[0]):
        fill.correction.apply(layer, got[0][layer], got[1][layer])
    for which in (0, 1):
        bases = [cache[which, 1:, :, -6:] for cache in caches]
        distances = torch.stack([(current[which, 1:] - base).norm(dim=2) for base in bases])
        weights = torch.softmax(-distances, dim=0)[:, :, :, None]
        expected = template[which].clone()
        expected[1:] += sum(w * o[which] for w, o in zip(weights, offsets, strict=True))
        torch.testing.assert_close(got[which], expected)


def _with_template(method: KVComm, turn: Turn, template: Tensor) -> State:
    state = method.state()
    (prefix,) = prefixes(turn)
    state.meta["prefixes"] = {"templates": [prefix.key]}
    state.entries[f"pf-{prefix.key}"] = {"k": template[0], "v": template[1]}
    return state
