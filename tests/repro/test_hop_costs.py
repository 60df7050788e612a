"""Costs per hop: rows as the executor counts them on a real model, bytes as pools store them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.session import Engine
from kvcmas.registry import make_method
from repro.profiles import load_profile, override
from repro.runners.hop_costs import HopCosts, load_hardware
from repro.runners.queue_model import Service
from repro.runners.queue_study import workload
from repro.runners.serving.capacity import A100_BF16, LLAMA_8B, UTILISATION, paper_capacity
from repro.runners.serving.cells import Study, make_cells
from repro.runners.serving.engine import Request
from repro.runners.serving.memory import pool_bytes
from traces import GeneratorSettings, generate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HARDWARE = load_hardware()
A100 = HARDWARE.gpu("a100")


@pytest.fixture(scope="module")
def adapter(tiny_llama: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> TransformersAdapter:
    return TransformersAdapter(tiny_llama[0])


def services(
    method: str, settings: dict[str, Any] | None = None, **trace: Any
) -> tuple[list[Service], tuple[int, ...]]:
    """Of one workflow in which everything is reused, with the tokens of its prompts."""
    made = workload(GeneratorSettings(vocab=50, workflows=1, **trace))
    chosen = {"method": method, "settings": settings or {}}
    profile = override(
        load_profile("paper").serve,
        {"methods": [chosen], "arrival": {"even": [0]}, "rho": [1.0], "repeats": 1}
        | {"selective_rho": {1.0: 0.9}},
    )
    cell = make_cells(Study(profile, made, 32, {}, None, Path()), profile.methods)[0]
    sent = cell.requests()
    found = HopCosts(LLAMA_8B).services(cell, cell.build(), sent, A100, HARDWARE.utilisation)
    return [found[request.key] for request in sent], made.prompts


@pytest.mark.parametrize(
    ("name", "settings", "exact"),
    [
        ("fullshared", {}, True),
        ("droidspeak", {"blocks": ((1, 2),)}, True),
        ("epic", {"tokens": 3}, True),
        # Which rows are selected is random here, so their attention differs a little.
        ("cacheblend", {"ratio": 0.3}, False),
        ("relaycaching", {"span": (1, 2, 3), "ratio": 0.3}, False),
    ],
)
def test_rows_are_those_of_the_executor(
    adapter: TransformersAdapter, name: str, settings: dict[str, Any], exact: bool
) -> None:
    (flow,) = generate(GeneratorSettings(vocab=adapter.spec.vocab, scale=64, workflows=1))
    method = make_method(name, settings)
    session = Engine(adapter, method).session(flow.workflow("fully_connected"), flow.request)
    costs = HopCosts(adapter.spec)
    for position, turn in enumerate(flow.turns):
        n = len(turn.output)
        run = session.run(turn.node, turn.prompt, max_new_tokens=n, output=turn.output)
        filled = tuple(d.segment for d in run.decisions if d.action != "dense")
        request = Request(flow, turn, position, turn.prompt, {}, ())
        counted = costs.account(method, request, filled)
        assert counted.row_layers == run.accounting.row_layers
        assert counted.prompt.executed == run.accounting.prompt.executed
        assert counted.flops == pytest.approx(run.accounting.flops, rel=0 if exact else 0.02)


def test_dense_prefill_is_the_formula_of_the_harness() -> None:
    assert A100.bf16_tflops * 1e12 == A100_BF16
    assert HARDWARE.utilisation.compute == UTILISATION
    assert all(gpu.source for gpu in HARDWARE.gpus.values())
    dense, prompts = services("nonshared", shared=8192)
    mean = sum(service.first_token_s for service in dense) / len(dense)
    # The executor leaves out what nobody reads of the last layer.
    assert 0.95 < mean * paper_capacity(prompts) < 1
    assert [service.rows for service in dense] == [float(n) for n in prompts]


def test_weights_bound_a_short_prefill() -> None:
    """Few rows take as long as reading the weights: 2 bytes of 7.5 billion parameters."""
    (only,), _ = services("nonshared", shared=16, scale=64, agents=1)
    assert only.first_token_s == pytest.approx(2 * 7.505e9 / (2039e9 * 0.8), rel=0.01)


@pytest.mark.parametrize("name", ["kvcmas", "kvcomm", "graphflow"])
def test_corrections_read_what_pools_hold(name: str) -> None:
    """One edge of a full pool: bases one and a half times (gate: values), deltas once."""
    shared, layers = 2048, LLAMA_8B.layers
    (flow,) = generate(
        GeneratorSettings(vocab=50, layout="L0", shared=shared, agents=2, workflows=1)
    )
    settings = {} if name == "kvcmas" else {"first_turn": "dense"}
    method = make_method(name, settings)
    pool = pool_bytes(method, flow, LLAMA_8B)
    work = HopCosts(LLAMA_8B).correction(method, shared)
    source = 1.5 * shared * LLAMA_8B.kv_bytes_per_token
    if name == "graphflow":
        # Its pool is counted in fp32, as while it is calibrated, with 8 bytes per position.
        assert work.nbytes == (pool - 8 * shared) / 2
    else:
        reads = (1.5 * layers + layers - 1) / (layers + layers - 1)
        assert work.nbytes - source == pytest.approx(reads * pool)
    assert (work.flops > 0) == (name == "kvcmas")


def test_references_are_paid_once() -> None:
    """Without a context of their own, each slot is prefilled by its first reader."""
    chained, _ = services("kvcmas")
    alone, _ = services("kvcmas", {"chained": False, "first_turn": "dense"})
    assert alone[0].first_token_s == pytest.approx(chained[0].first_token_s)
    # The second turn is the first that asks, for the shared span and one output.
    assert alone[1].rows == pytest.approx(chained[1].rows + 2048 + 128)
    assert alone[2].rows == pytest.approx(chained[2].rows + 128)
    corrected, _ = services("kvcmas", {"chained": False})
    assert corrected[0].rows < chained[0].rows + 1
    assert corrected[1].rows == pytest.approx(chained[1].rows + 128)


def test_methods_differ_by_what_they_execute() -> None:
    cost = {name: services(name)[0][-1] for name in ("nonshared", "fullshared", "kvcmas", "kvcomm")}
    blend = services("cacheblend")[0][-1]
    assert cost["fullshared"].rows == cost["kvcmas"].rows < blend.rows < cost["nonshared"].rows
    order = [cost[name].first_token_s for name in ("fullshared", "kvcmas", "kvcomm", "nonshared")]
    assert order == sorted(order)
