"""What goes wrong in one request stays in it, is reported, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcmas.engine.segments import Prompt
from kvcmas.engine.workflow import sequential
from kvcmas.errors import UserError
from kvcmas.serving.params import KEY, TurnParams
from tests.serving.play import Pair, Served, driver, output_of, play_host, request_texts
from tests.serving.test_concurrency import alone, turn
from tests.workflows import agent_prompt

pytestmark = pytest.mark.vllm

WORKFLOW = sequential(2)


def named(name: str, at: int, n: int = 1) -> tuple[Prompt, TurnParams]:
    prompt, params = turn(WORKFLOW, n, at, 60)
    return prompt, params.model_copy(update={"request": name})


def is_exact(pair: Pair, served: Served) -> bool:
    expected = alone(driver(pair), served.prompt)
    return float((served.logprobs - expected.logprobs).abs().max()) <= 1e-4


@pytest.mark.parametrize("where", ["plan", "filling", "learning"])
def test_a_method_that_raises_harms_its_own_request_only(pair: Pair, where: str) -> None:
    pair.host.configure("tests.serving.methods:Failing", {"where": where})
    drive = driver(pair)
    for name in ("good", "bad"):
        drive.submit(*named(name, 0))
    drive.settle()
    requests = {name: drive.submit(*named(name, 1)) for name in ("good", "bad")}
    served = drive.settle()
    good, bad = (served[requests[name]] for name in ("good", "bad"))
    assert good.report is not None
    assert bad.report is not None
    assert good.report.fell_back is None
    assert good.report.accounting.prompt.reused > 0
    assert "RuntimeError: injected" in (bad.report.fell_back or "")
    assert is_exact(pair, bad)
    assert not is_exact(pair, good)


def test_a_worker_that_cannot_execute_at_all_leaves_the_rows_to_vllm(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the plan nor a dense execution works: vLLM is told which blocks are bad."""
    from kvcmas.serving.adapter import VllmAdapter

    pair.host.configure("fullshared")
    drive = driver(pair)
    drive.submit(*named("r", 0))
    drive.settle()

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(VllmAdapter, "finish", broken)
    request = drive.submit(*named("r", 1))
    served = drive.settle()[request]
    monkeypatch.undo()
    assert served.finish == "length"
    assert served.report is not None
    assert (served.report.fell_back or "").count("injected") == 2
    assert served.report.external_rows == 0
    assert is_exact(pair, served)


def test_an_aborted_request_leaves_nothing(pair: Pair) -> None:
    """Aborted while it waits, between two chunks of its prefill, and while it decodes."""
    pair.host.configure("fullshared")
    drive = driver(pair)
    prompt, params = turn(WORKFLOW, 2, 0, 600)
    for steps in (0, 1, 4):
        request = drive.submit(prompt, params, max_tokens=20)
        for _ in range(steps):
            drive.step()
        pair.host.abort(request)
        assert drive.settle()[request].finish is None
        assert not any(pair.host.leftovers().values())
    # Nobody holds the query yet, so the next turn's is dense; then the workflow is over.
    prompt, params = turn(WORKFLOW, 2, 1, 600)
    request = drive.submit(prompt, params)
    served = drive.settle()[request]
    assert served.report is not None
    assert [decision.reason for decision in served.report.decisions] == ["first", "first"]
    assert pair.host.stats()["source_bytes"] == 0


def test_a_missing_source_is_a_dense_turn(pair: Pair) -> None:
    pair.host.configure("fullshared")
    drive = driver(pair)
    request = drive.submit(*named("nobody", 1))
    served = drive.settle()[request]
    assert served.report is not None
    assert served.report.accounting.prompt.reused == 0
    assert served.report.external_rows == 0
    assert is_exact(pair, served)


def test_parameters_that_make_no_sense_run_on_plain_vllm(pair: Pair) -> None:
    pair.host.configure("fullshared")
    drive = driver(pair)
    drive.submit(*named("r", 0))
    drive.settle()
    prompt, params = named("r", 1)
    longer = params.model_copy(update={"segments": (*params.segments, params.segments[0])})
    request = drive.submit(prompt, longer)
    served = drive.settle()[request]
    assert served.report is None
    assert served.cached == 0
    assert is_exact(pair, served)
    (reason,) = pair.host.fallbacks()
    assert "the segments hold" in reason
    # The turn itself can still be asked for properly.
    request = drive.submit(prompt, params)
    again = drive.settle()[request]
    assert again.report is not None
    assert again.report.accounting.prompt.reused > 0


def test_other_text_in_a_slot_is_a_dense_turn(pair: Pair) -> None:
    pair.host.configure("fullshared")
    drive = driver(pair)
    drive.submit(*named("r", 0))
    drive.settle()
    request = drive.submit(*named("r", 1, n=5))
    served = drive.settle()[request]
    assert served.report is not None
    assert "slot q holds other tokens" in (served.report.fell_back or "")
    assert is_exact(pair, served)


def test_a_workflow_cannot_reach_another_ones_caches(pair: Pair) -> None:
    """Same text, same slots: another request, or another tenant, starts from nothing."""
    pair.host.configure("fullshared")
    drive = driver(pair)
    drive.submit(*named("mine", 0))
    drive.settle()
    prompt, params = named("mine", 1)
    for other in (
        params.model_copy(update={"request": "yours"}),
        params.model_copy(update={"tenant": "you"}),
    ):
        request = drive.submit(prompt, other)
        served = drive.settle()[request]
        assert served.report is not None
        assert served.report.accounting.prompt.reused == 0
    request = drive.submit(prompt, params)
    served = drive.settle()[request]
    assert served.report is not None
    assert served.report.accounting.prompt.reused > 0


@pytest.mark.parametrize("pair", ["tiny_llama"], indirect=True)
def test_many_short_workflows_leave_memory_flat(pair: Pair) -> None:
    pair.host.configure("kvcmas", {"rank_base": 4, "rank_delta": 4, "capacity": 3})
    drive = driver(pair)
    pool = None
    for n in range(500):
        texts = request_texts(n, 8)
        for node in WORKFLOW.nodes:
            prompt = agent_prompt(WORKFLOW, node, texts, system=4)
            texts[node.out_slot] = output_of(n, node)[:4]
            params = TurnParams.of(WORKFLOW, node, f"w{n}", prompt, output=texts[node.out_slot])
            pair.host.submit(prompt.ids, params)
        drive.settle()
        if n % 100 == 99:
            pair.host.settle()
            stats = pair.host.stats()
            assert (stats["turns"], stats["workflows"], stats["source_bytes"]) == (0, 0, 0)
            assert not any(pair.host.leftovers().values())
            held = pair.host.state().nbytes
            assert pool is None or held == pool
            pool = held


def test_pools_are_per_tenant_where_the_server_says_so(pair: Pair) -> None:
    settings = {"rank_base": 4, "rank_delta": 4}
    for scope, shared in (("process", True), ("tenant", False)):
        pair.host.configure("kvcmas", settings, pool_scope=scope)
        play_host(pair, WORKFLOW, 1, False, tenant="a")
        assert pair.host.state("a").nbytes > 0
        assert (pair.host.state("b").nbytes > 0) == shared


def test_a_saved_pool_is_a_warm_pool(pair: Pair) -> None:
    settings = {"rank_base": 8, "rank_delta": 8, "tau": 1}
    pair.host.configure("kvcmas", settings)
    for n in range(2):
        play_host(pair, WORKFLOW, n, False)
    saved = pair.host.state()
    warm = play_host(pair, WORKFLOW, 2)[1]
    pair.host.reset()
    assert pair.host.state().nbytes == 0
    cold = play_host(pair, WORKFLOW, 2)[1]
    pair.host.reset()
    pair.host.load_state(saved)
    again = play_host(pair, WORKFLOW, 2)[1]
    assert warm.report is not None
    assert warm.report.accounting.prompt.corrected > 0
    assert cold.report is not None
    assert cold.report.accounting.prompt.corrected == 0
    assert torch.equal(again.logprobs, warm.logprobs)


def test_the_method_cannot_change_under_requests(pair: Pair) -> None:
    pair.host.configure("fullshared")
    with pytest.raises(UserError, match="unknown method"):
        pair.host.configure("fulshared")
    request = pair.host.submit(*_ids(named("r", 0)))
    with pytest.raises(UserError, match="requests are under way"):
        pair.host.configure("nonshared")
    with pytest.raises(RuntimeError, match="not empty at reset"):
        pair.host.reset()
    pair.host.abort(request)


def _ids(sent: tuple[Prompt, TurnParams]) -> tuple[list[int], TurnParams]:
    prompt, params = sent
    assert KEY in params.to_kv_transfer_params()
    return prompt.ids, params
