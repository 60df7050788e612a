"""With an exact delta the plug-in equals vLLM's own prefill: mixed, chunked, preempted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcmas.engine.executor import Executor
from kvcmas.engine.segments import Prompt
from kvcmas.engine.workflow import Workflow, sequential
from kvcmas.serving.params import TurnParams
from tests.serving.conftest import TOKENS
from tests.serving.methods import ExactDelta
from tests.serving.play import Driver, Pair, Served, driver, output_of, play_host, request_texts
from tests.workflows import Ids, agent_prompt, random_ids

pytestmark = pytest.mark.vllm

CLOSE = 1e-4
WORKFLOW = sequential(3)


@pytest.fixture
def exact(pair: Pair) -> Iterator[Pair]:
    """The engine under a method that corrects with the true delta."""
    ExactDelta.executor = Executor(pair.adapter)
    pair.host.configure("tests.serving.methods:ExactDelta")
    yield pair
    ExactDelta.executor = None


def turn(workflow: Workflow, n: int, at: int, length: int) -> tuple[Prompt, TurnParams]:
    """Turn ``at`` of request ``n``, all outputs before it recorded."""
    texts = request_texts(n, length)
    for node in workflow.nodes[:at]:
        texts[node.out_slot] = output_of(n, node)
    node = workflow.nodes[at]
    prompt = agent_prompt(workflow, node, texts)
    output = output_of(n, node)
    return prompt, TurnParams.of(workflow, node, f"n{n}", prompt, output=output)


def alone(drive: Driver, prompt: Prompt, output: Ids | None = None) -> Served:
    """The prompt on plain vLLM, with nobody beside it."""
    options = {} if output is None else forced_decoding(output)
    request = drive.submit(prompt, **options)
    return drive.settle()[request]


def forced_decoding(output: Ids) -> dict[str, Any]:
    """Options of a request that decodes ``output``, with the logprob of each of its tokens."""
    return {"output": output, "max_tokens": len(output), "logprobs": 0}


def error(served: Served, expected: Served) -> float:
    """Over all logprobs of the first token, or over those of the tokens that decoding took."""
    assert served.tokens == expected.tokens
    difference = (served.logprobs - expected.logprobs).abs()
    if len(served.tokens) > 1:
        difference = difference.gather(1, torch.tensor([served.tokens]).T)
    return float(difference.max())


def test_six_mixed_requests_at_once(exact: Pair) -> None:
    drive = driver(exact)
    lengths = [60, 100, 150, 40]
    for n, length in enumerate(lengths):
        request = drive.submit(*turn(WORKFLOW, n, 0, length))
        drive.settle()[request]
    batch = [turn(WORKFLOW, n, 1, length) for n, length in enumerate(lengths)]
    plain = Prompt(agent_prompt(WORKFLOW, WORKFLOW.nodes[0], {"q": random_ids(3, 90)}).segments)
    submitted = [(prompt, drive.submit(prompt, params)) for prompt, params in batch]
    submitted.append((plain, drive.submit(plain)))
    first = turn(WORKFLOW, 9, 0, 70)
    submitted.append((first[0], drive.submit(*first)))
    served = drive.settle()
    for prompt, request in submitted:
        assert error(served[request], alone(drive, prompt)) <= CLOSE
    reused = [served[request].report for _, request in submitted[: len(lengths)]]
    assert all(report and report.accounting.prompt.corrected > 0 for report in reused)


def test_prompts_longer_than_a_step(exact: Pair) -> None:
    """Both the reused part and the tail are longer than the token budget."""
    served = play_host(exact, WORKFLOW, 20, length=TOKENS + 100)
    texts = request_texts(20, TOKENS + 100)
    long = Prompt(agent_prompt(WORKFLOW, WORKFLOW.nodes[1], texts).segments)
    assert len(long) > TOKENS
    for turn_served in served:
        assert error(turn_served, alone(driver(exact), turn_served.prompt)) <= CLOSE


def test_preempted_requests_take_their_plans_up_again(exact: Pair) -> None:
    drive = driver(exact)
    count, decoded = 6, 280
    for n in range(count):
        request = drive.submit(*turn(WORKFLOW, 40 + n, 0, 200))
        drive.settle()[request]
    submitted = []
    for n in range(count):
        prompt, params = turn(WORKFLOW, 40 + n, 1, 200)
        output = random_ids(70 + n, decoded)
        params = params.model_copy(update={"output": None})
        request = drive.submit(prompt, params, **forced_decoding(output))
        submitted.append((prompt, output, request))
    served = drive.settle()
    reports = [served[request].report for *_, request in submitted]
    assert max(report.loads for report in reports if report) > 1, "nobody was preempted"
    for prompt, output, request in submitted:
        expected = alone(drive, prompt, output)
        assert served[request].tokens == output
        assert error(served[request], expected) <= CLOSE
    # Decoded outputs are sources as good as replayed ones.
    for n, (_, output, _) in enumerate(submitted):
        texts = request_texts(40 + n, 200) | {"out1": output}
        prompt = agent_prompt(WORKFLOW, WORKFLOW.nodes[2], texts)
        request = drive.submit(
            prompt, TurnParams.of(WORKFLOW, WORKFLOW.nodes[2], f"n{40 + n}", prompt)
        )
        last = drive.settle()[request]
        assert last.report is not None
        assert last.report.accounting.shared[3].corrected > 0
        assert error(last, alone(drive, prompt)) <= CLOSE


def test_an_approximate_request_leaves_the_next_one_exact(pair: Pair) -> None:
    """Nothing of what the plug-in wrote is found by a plain request with the same prompt."""
    drive = driver(pair)
    prompt, _ = turn(WORKFLOW, 60, 1, 150)
    before = alone(drive, prompt)
    pair.host.configure("fullshared")
    approximate = play_host(pair, WORKFLOW, 60, length=150)[1]
    assert approximate.prompt == prompt
    after = alone(drive, prompt)
    assert float((approximate.logprobs - before.logprobs).abs().max()) > 0.01
    assert torch.equal(after.logprobs, before.logprobs)
    assert after.cached == 0
