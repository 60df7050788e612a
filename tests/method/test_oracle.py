"""What holds for an exact delta: the oracle, and identical contexts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from baselines.fullshared import FullShared
from baselines.graphflow import GraphFlow
from baselines.kvcomm import KVComm
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Decision, Fill, Method, Plan, Sources, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine
from kvcmas.engine.workflow import Node
from kvcmas.method.kvcmas import KVCMAS
from tests.replay import WORKFLOW, Truth, replayed
from tests.workflows import agent_prompt, random_ids


@dataclass(frozen=True)
class Exact:
    """The delta that makes a source cache the target's."""

    k: Tensor
    v: Tensor

    @property
    def rows(self) -> int:
        return self.k.shape[2]

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        k += self.k[layer]
        v += self.v[layer]


@dataclass(frozen=True)
class Oracle(Method):
    """Reuse every held PH with the exact delta, taken from a dense prefill of the same prompt.

    ``perturb`` adds to one row of one layer of the first fill.
    """

    name: ClassVar[str] = "oracle"

    executor: Executor | None = field(default=None, compare=False)
    perturb: float = 0.0

    def plan(self, turn: Turn, sources: Sources) -> Plan:
        assert self.executor is not None
        dense = self.executor.run(turn.prompt, Plan.make(turn.prompt)).buffer
        fills, decisions = [], []
        for i in turn.prompt.shared():
            held = sources.held(i)
            if held is None:
                decisions.append(Decision(i, None, "dense", "first"))
                continue
            target = dense.extract(turn.prompt.rows(i))
            delta = Exact(target.k - held.cache.k, target.v - held.cache.v)
            if not fills:
                delta.v[2, :, 3] += self.perturb
            fills.append(Fill(i, held.cache, delta))
            decisions.append(Decision(i, turn.edge(i, held.node), "correct", "oracle"))
        return Plan.make(turn.prompt, tuple(fills), tuple(decisions))


def test_source_plus_exact_delta_gives_nonshareds_logits_at_every_turn(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    truth = replayed(Engine(model, NonShared()), truths[-1], "r")
    results = replayed(Engine(model, Oracle(executor=Executor(model))), truth, "r")
    for node, result in results.items():
        first, after = truth[node].first_logits, truth[node].continuation_logits
        torch.testing.assert_close(result.first_logits, first, atol=1e-3, rtol=0)
        torch.testing.assert_close(result.continuation_logits, after, atol=1e-3, rtol=0)
        if node != "A0":
            assert all(e.executed == 0 for e in result.accounting.shared.values())


def test_perturbing_one_reused_row_changes_the_logits(
    model: TransformersAdapter, truths: list[Truth]
) -> None:
    runs = [
        replayed(Engine(model, Oracle(executor=Executor(model), perturb=p)), truths[-1], "r")
        for p in (0.0, 1.0)
    ]
    for node in ("A1", "A2", "A3"):
        difference = (runs[1][node].first_logits - runs[0][node].first_logits).abs().max()
        assert float(difference) > 1e-3


def conversation(texts: Mapping[str, tuple[int, ...]], node: Node) -> Prompt:
    """Every agent has the same PF, so that a prompt continues the one before it."""
    glue = pf(random_ids(2, 4))
    segments = [pf(random_ids(1, 10)), ph("q", texts["q"]), glue]
    for parent in node.parents:
        slot = WORKFLOW[parent].out_slot
        segments += [ph(slot, texts[slot]), glue]
    return Prompt(tuple(segments))


def converse(engine: Engine, request: str, seed: int) -> Truth:
    session, texts, results = engine.session(WORKFLOW, request), {"q": random_ids(seed, 15)}, {}
    for node in WORKFLOW.nodes:
        prompt = conversation(texts, node)
        output = random_ids(seed + 1 + node.agent, 6)
        results[node.name] = session.run(node, prompt, max_new_tokens=0, output=output)
        texts[node.out_slot] = output
    return results


@pytest.mark.parametrize(
    ("method", "warm_up"),
    [
        (NonShared(), []),
        (FullShared(), []),
        (KVCMAS(tau=1), [20, 30]),  # other requests: their deltas are zero
        (KVCMAS(tau=1, chained=False, rank_delta=None), [10, 10]),
        (KVComm(gamma=1), [10, 10]),  # the same request: the deltas are those from the reference
        (GraphFlow(n_cal=1), [10]),
    ],
    ids=["nonshared", "fullshared", "kvcmas", "non_chained", "kvcomm", "graphflow"],
)
def test_identical_contexts_are_exact(
    model: TransformersAdapter, method: Method, warm_up: list[int]
) -> None:
    method = replace(method)
    truth = converse(Engine(model, NonShared()), "r", 10)
    engine = Engine(model, method)
    for n, seed in enumerate(warm_up):
        converse(engine, f"w{n}", seed)
    results = converse(engine, "r", 10)
    for node, result in results.items():
        expected = truth[node].first_logits
        torch.testing.assert_close(result.first_logits, expected, atol=1e-3, rtol=0)
    if not isinstance(method, NonShared):
        actions = {d.action for d in results["A3"].decisions}
        assert "dense" not in actions


def test_prompts_of_the_workflows_do_differ_in_context(model: TransformersAdapter) -> None:
    """Without this the tests above would show nothing."""
    texts = {"q": random_ids(1, 9), "out0": random_ids(2, 5)}
    prompts = [agent_prompt(WORKFLOW, node, texts) for node in WORKFLOW.nodes[:2]]
    run = Executor(model).run
    caches = [run(p, Plan.make(p)).buffer.extract(p.rows(1)) for p in prompts]
    assert float((caches[0].v - caches[1].v).abs().max()) > 0.1
