"""The worker's side without vLLM: its pages are stood in for by buffers of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import Buffer, ContiguousBuffer
from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt
from kvcmas.engine.session import Engine
from kvcmas.engine.workflow import fully_connected
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from kvcmas.serving.config import ServingConfig
from kvcmas.serving.desk import Desk
from kvcmas.serving.messages import Begin, Drop, End
from kvcmas.serving.params import TurnParams
from kvcmas.serving.report import TurnReport
from tests.workflows import Ids, agent_prompt, random_ids

WORKFLOW = fully_connected(3)
CAPACITY = 400


class Rig:
    """A desk, and the part of vLLM that it works with: pages, and a prefill of the other rows."""

    def __init__(self, adapter: TransformersAdapter, method: str, **config: Any) -> None:
        self.executor = Executor(adapter)
        self.desk = Desk(adapter, self.pages, ServingConfig(method=method, **config))
        self._pages: dict[int, ContiguousBuffer] = {}

    def pages(self, blocks: Sequence[int], rows: int) -> Buffer:
        buffer = self.executor.new_buffer(rows, CAPACITY - rows)
        held = self._pages.setdefault(blocks[0], buffer)
        buffer.k, buffer.v = held.k, held.v
        return buffer

    def serve(
        self,
        request: str,
        at: int,
        texts: Mapping[str, Ids],
        *,
        output: Ids = (),
        stop: int | None = None,
        replay: bool = True,
        held: bool = True,
        tenant: str = "",
        force: bool | None = None,
    ) -> tuple[Tensor, TurnReport]:
        """One turn; returns the logits of its last prompt row. ``stop`` is that of the last PH."""
        node = WORKFLOW.nodes[at]
        prompt = agent_prompt(WORKFLOW, node, texts)
        params = TurnParams.of(
            WORKFLOW,
            node,
            request,
            prompt,
            output=output if replay else None,
            tenant=tenant,
            force={} if force is None else dict.fromkeys(prompt.shared(), force),
        )
        key, block = f"{tenant}{request}{at}", (hash((tenant, request, at)),)
        if stop is None:
            stop = max(prompt.rows(i).stop for i in prompt.shared())
        self.desk.begin(Begin(key, params, tuple(prompt.ids), stop, block))
        fed = () if replay else output[:-1]
        logits = self.native(block, prompt, stop, fed)
        rows = len(prompt) + len(fed)
        self.desk.end(End(key, () if replay else output, rows, block, held))
        return logits, self.desk.reports.pop()

    def native(self, block: tuple[int], prompt: Prompt, stop: int, fed: Ids = ()) -> Tensor:
        """What vLLM does: the rows from ``stop`` on, then the tokens it feeds back."""
        buffer = self.pages(block, len(prompt))
        assert isinstance(buffer, ContiguousBuffer)
        buffer.length = stop
        logits = self.executor.extend(buffer, prompt.ids[stop:])[-1]
        if fed:
            self.executor.extend(buffer, fed)
        return logits


@pytest.fixture(scope="module")
def adapter(tiny_llama: tuple) -> TransformersAdapter:
    return TransformersAdapter(tiny_llama[0])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("nonshared", {}),
        ("fullshared", {}),
        ("kvcmas", {"tau": 1}),
        ("kvcmas", {"chained": False, "tau": 1}),
        ("droidspeak", {"blocks": ((2, 3),)}),
        ("relaycaching", {"span": (1, 2, 3), "ratio": 0.5}),
        ("relaycaching", {"span": (0, 1, 3), "ratio": 0.5, "influence": "all"}),
        ("fullshared", {"pf_policy": "delta"}),
    ],
)
@pytest.mark.parametrize("replay", [True, False])
def test_turns_are_those_of_a_session(
    adapter: TransformersAdapter, method: str, settings: dict[str, Any], replay: bool
) -> None:
    """Whether the output is decoded (its last token is never fed back) or replayed."""
    rig = Rig(adapter, method, settings=settings)
    engine = Engine(adapter, make_method(method, settings))
    wants = engine.method.wants
    collects = bool(wants.hidden_layers) or wants.received == "all"
    for n in range(3):
        session, texts = engine.session(WORKFLOW, f"n{n}"), {"q": random_ids(n, 40)}
        for at, node in enumerate(WORKFLOW.nodes):
            prompt = agent_prompt(WORKFLOW, node, texts)
            output = random_ids(50 + at, 9)
            result = session.run(node, prompt, max_new_tokens=9, output=output)
            whole = collects or settings.get("pf_policy") == "delta"
            logits, report = rig.serve(
                f"n{n}",
                at,
                texts,
                output=output,
                stop=len(prompt) - 1 if whole else None,
                replay=replay,
            )
            torch.testing.assert_close(logits, result.first_logits, atol=1e-4, rtol=1e-4)
            assert report.fell_back is None
            assert report.accounting.shared == result.accounting.shared
            assert report.accounting.prompt == result.accounting.prompt
            assert report.first_seen == result.first_seen
            assert report.holders == result.holders
            assert report.output_tokens == 9
            texts[node.out_slot] = output
    assert rig.desk.stats == {
        "turns": 0,
        "workflows": 0,
        "source_bytes": 0,
        "reference_bytes": 0,
    }


def test_vllm_executes_its_rows_in_every_layer(adapter: TransformersAdapter) -> None:
    """The Transformers engine skips what nobody needs in the last layer; vLLM does not."""
    rig = Rig(adapter, "nonshared")
    texts = {"q": random_ids(1, 40)}
    _, report = rig.serve("r", 0, texts, stop=0, held=False)
    prompt = agent_prompt(WORKFLOW, WORKFLOW.nodes[0], texts)
    spec, rows = adapter.spec, len(prompt)
    layer = spec.layer_flops(rows, rows, rows * (rows + 1) // 2)
    assert report.accounting.flops == spec.layers * layer + 2 * spec.hidden * spec.vocab
    assert report.accounting.row_layers == spec.layers * rows
    assert report.external_rows == 0


def test_a_preempted_turn_takes_its_plan_up_again(adapter: TransformersAdapter) -> None:
    rig = Rig(adapter, "fullshared")
    texts = {"q": random_ids(1, 40)}
    rig.serve("r", 0, texts, output=random_ids(2, 9))
    texts["out0"] = random_ids(2, 9)
    node = WORKFLOW.nodes[1]
    prompt = agent_prompt(WORKFLOW, node, texts)
    params, ids = TurnParams.of(WORKFLOW, node, "r", prompt), tuple(prompt.ids)
    stop = prompt.rows(3).stop
    rig.desk.begin(Begin("k", params, ids, stop, (7,)))
    first = rig.native((7,), prompt, stop)
    rig.desk.begin(Begin("k", params, ids, stop, (8,)))
    again = rig.native((8,), prompt, stop)
    assert torch.equal(first, again)
    rig.desk.end(End("k", (), len(prompt), (8,), True))
    report = rig.desk.reports[-1]
    assert report.loads == 2
    assert report.seconds.again > 0


def test_a_dropped_turn_changes_nothing(adapter: TransformersAdapter) -> None:
    rig = Rig(adapter, "fullshared")
    texts = {"q": random_ids(1, 40)}
    rig.serve("r", 0, texts, output=random_ids(2, 9))
    texts["out0"] = random_ids(2, 9)
    prompt = agent_prompt(WORKFLOW, WORKFLOW.nodes[1], texts)
    params = TurnParams.of(WORKFLOW, WORKFLOW.nodes[1], "r", prompt)
    rig.desk.begin(Begin("k", params, tuple(prompt.ids), prompt.rows(3).stop, (7,)))
    rig.desk.drop(Drop("k"))
    rig.desk.drop(Drop("never began"))
    assert rig.desk.stats["turns"] == 0
    assert rig.desk.reports == []
    _, report = rig.serve("r", 2, texts)
    assert set(report.holders.values()) == {"A0"}


def test_the_longest_idle_workflow_is_forgotten(adapter: TransformersAdapter) -> None:
    rig = Rig(adapter, "fullshared", workflows=2)
    for n in range(4):
        _, report = rig.serve(f"n{n}", 0, {"q": random_ids(1, 40)}, output=random_ids(2, 9))
        assert report.fell_back is None
        assert rig.desk.stats["workflows"] == min(2, n + 1)
    texts = {"q": random_ids(1, 40), "out0": random_ids(2, 9)}
    _, report = rig.serve("n0", 1, texts)
    assert report.accounting.prompt.reused == 0
    _, report = rig.serve("n3", 1, texts)
    assert report.accounting.prompt.reused > 0


def test_a_workflow_that_the_scheduler_forgot_is_dense(adapter: TransformersAdapter) -> None:
    """It gave the plug-in no rows although the worker still holds the sources."""
    rig = Rig(adapter, "fullshared")
    texts = {"q": random_ids(1, 40)}
    rig.serve("r", 0, texts, output=random_ids(2, 9))
    _, report = rig.serve("r", 1, texts, stop=0)
    assert report.fell_back == "the plan fills rows that vLLM executes"
    assert [decision.action for decision in report.decisions] == ["dense"]
    assert report.accounting.prompt.executed == report.accounting.prompt.total


def test_the_seconds_after_first_tokens_are_told_apart(adapter: TransformersAdapter) -> None:
    rig = Rig(adapter, "kvcmas", settings={"rank_delta": 4})
    texts = {"q": random_ids(1, 40)}
    rig.serve("r", 0, texts, output=random_ids(2, 9))
    texts["out0"] = random_ids(2, 9)
    rig.desk.after_seconds = 0.0
    _, report = rig.serve("r", 1, texts, output=random_ids(3, 9))
    seconds = report.seconds
    assert min(seconds.plan, seconds.execute, seconds.build, seconds.extend, seconds.capture) > 0
    assert rig.desk.after_seconds >= seconds.build + seconds.extend + seconds.capture


def test_background_references_are_off_the_path(adapter: TransformersAdapter) -> None:
    settings = {"chained": False, "reference": "background"}
    rig = Rig(adapter, "kvcmas", settings=settings)
    _, report = rig.serve("r", 0, {"q": random_ids(1, 40)})
    assert report.seconds.background > 0
    assert report.accounting.reference_tokens == 0
    assert rig.desk.after_seconds >= report.seconds.background


def test_another_graph_for_the_same_request_is_a_dense_turn(
    adapter: TransformersAdapter,
) -> None:
    rig = Rig(adapter, "fullshared")
    rig.serve("r", 0, {"q": random_ids(1, 40)})
    other = fully_connected(2)
    prompt = agent_prompt(other, other.nodes[1], {"q": random_ids(1, 40)})
    params = TurnParams.of(other, other.nodes[1], "r", prompt)
    rig.desk.begin(Begin("k", params, tuple(prompt.ids), 20, (7,)))
    rig.desk.end(End("k", (), len(prompt), (7,), True))
    report = rig.desk.reports.pop()
    assert "another graph" in (report.fell_back or "")
    assert report.accounting.prompt.reused == 0
    assert rig.desk.stats["turns"] == 0
    # It took no part in the workflow of that name, which goes on.
    _, report = rig.serve("r", 1, {"q": random_ids(1, 40)})
    assert report.accounting.prompt.reused > 0


def test_the_method_stays_while_turns_are_under_way(adapter: TransformersAdapter) -> None:
    rig = Rig(adapter, "fullshared")
    prompt = agent_prompt(WORKFLOW, WORKFLOW.nodes[0], {"q": random_ids(1, 40)})
    params = TurnParams.of(WORKFLOW, WORKFLOW.nodes[0], "r", prompt)
    rig.desk.begin(Begin("k", params, tuple(prompt.ids), 0, ()))
    with pytest.raises(UserError, match="under way"):
        rig.desk.configure(ServingConfig(method="nonshared"))
