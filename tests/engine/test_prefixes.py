"""Serving agent-specific segments from a store (``pf_policy``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from baselines.cacheblend import CacheBlend
from baselines.droidspeak import DroidSpeak
from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import Origin
from kvcmas.engine.contract import Method, PFPolicy, Plan, State
from kvcmas.engine.segments import Prompt, pf
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import QUERY, sequential
from kvcmas.errors import UserError
from kvcmas.method.kvcmas import KVCMAS
from tests.workflows import Ids, agent_prompt, random_ids

WORKFLOW = sequential(2)
LAYERS = 4  # of both tiny models
POLICIES: tuple[PFPolicy, ...] = ("rotate", "delta")
METHODS: dict[str, Method] = {
    "nonshared": NonShared(),
    "fullshared": FullShared(),
    "kvcmas": KVCMAS(tau=1),
    "kvcmas, first dense": KVCMAS(tau=0),
    "cacheblend": CacheBlend(ratio=0.3),
    "droidspeak": DroidSpeak(blocks=((1, 2),)),
}


def policy(method: Method, name: PFPolicy, rank: int = 8) -> Any:
    """A fresh method with this ``pf_policy``."""
    return replace(method, pf_policy=name, pf_rank=rank)


def serve(engine: Engine, request: str, seed: int, *, tail: int = 5) -> dict[str, TurnResult]:
    """One request with outputs that depend on ``seed`` only."""
    session, texts = engine.session(WORKFLOW, request), {QUERY: random_ids(seed, 15)}
    results = {}
    for node in WORKFLOW.nodes:
        prompt = agent_prompt(WORKFLOW, node, texts, tail=tail)
        output: Ids = random_ids(seed + 1 + node.agent, 6)
        results[node.name] = session.run(
            node, prompt, max_new_tokens=0, output=output, keep_buffer=True
        )
        texts[node.out_slot] = output
    return results


def origin(result: TurnResult) -> torch.Tensor:
    assert result.buffer is not None
    return result.buffer.origin


def largest(results: Mapping[str, TurnResult], truth: Mapping[str, TurnResult]) -> float:
    return max(
        float((results[node].first_logits - truth[node].first_logits).abs().max()) for node in truth
    )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_first_request_executes_every_pf(
    model: TransformersAdapter, method: Method, name: PFPolicy
) -> None:
    plain = serve(Engine(model, replace(method)), "r", 10)
    first = serve(Engine(model, policy(method, name)), "r", 10)
    assert largest(first, plain) == 0
    assert all(torch.equal(origin(first[node]), origin(plain[node])) for node in plain)


@pytest.mark.parametrize(
    ("method", "name", "tail"),
    [
        *((method, name, 5) for method in METHODS for name in POLICIES),
        *((method, "rotate", tail) for method in ("nonshared", "kvcmas") for tail in (1, 0)),
    ],
)
def test_later_requests_serve_every_pf(
    model: TransformersAdapter, method: str, name: PFPolicy, tail: int
) -> None:
    """PF rows leave the schedule, all but the last row; PH rows are as without the policy."""
    engine = Engine(model, policy(METHODS[method], name))
    plain = Engine(model, replace(METHODS[method]))
    for seed, request in ((10, "w0"), (20, "w1")):
        serve(engine, request, seed, tail=tail)
        serve(plain, request, seed, tail=tail)
    results = serve(engine, "r", 30, tail=tail)
    expected = serve(plain, "r", 30, tail=tail)
    for node, result in results.items():
        prompt, got, before = result.prompt, origin(result), origin(expected[node])
        served = Origin.CORRECTED if name == "delta" else Origin.REUSED
        assert bool((got[:, -1] == Origin.EXECUTED).all())
        for i, segment in enumerate(prompt.segments):
            rows = [row for row in prompt.rows(i) if row < len(prompt) - 1]
            if segment.kind == "PH":
                assert torch.equal(got[:, rows], before[:, rows])
            else:
                assert bool((got[0, rows] == Origin.REUSED).all())
                assert bool((got[1:, rows] == (served if i else Origin.REUSED)).all())
        assert [d.action for d in result.decisions] == [d.action for d in expected[node].decisions]
        assert result.accounting.prompt.total == LAYERS * len(prompt)
        assert result.accounting.shared == expected[node].accounting.shared
        assert bool(result.first_logits.isfinite().all())


def test_only_ph_and_the_last_row_are_executed(model: TransformersAdapter) -> None:
    engine = Engine(model, NonShared(pf_policy="rotate"))
    serve(engine, "w", 10)
    for result in serve(engine, "r", 20).values():
        shared = sum(len(result.prompt.segments[i]) for i in result.prompt.shared())
        assert result.accounting.row_layers == LAYERS * (shared + 1)


@pytest.mark.parametrize("name", POLICIES)
def test_a_system_segment_at_position_0_is_exact(
    model: TransformersAdapter, name: PFPolicy
) -> None:
    truth = serve(Engine(model, NonShared()), "r", 20)
    engine = Engine(model, policy(NonShared(), name))
    serve(engine, "w", 10)
    for node, result in serve(engine, "r", 20).items():
        dense, system = truth[node].buffer, len(result.prompt.segments[0])
        assert result.buffer is not None and dense is not None
        for got, expected in ((result.buffer.k, dense.k), (result.buffer.v, dense.v)):
            torch.testing.assert_close(
                got[:, :, :system], expected[:, :, :system], atol=2e-5, rtol=0
            )
        # Glue after a PH has not seen it: rotation alone is approximate.
        glue = result.prompt.rows(2)
        difference = (result.buffer.v[1:, :, glue] - dense.v[1:, :, glue]).abs().max()
        assert float(difference) > 1e-2


def test_rotate_serves_the_rows_of_a_template_prefill(model: TransformersAdapter) -> None:
    engine = Engine(model, NonShared(pf_policy="rotate"))
    serve(engine, "w", 10)
    result = serve(engine, "r", 20)["A1"]
    assert result.buffer is not None
    parts = [segment for segment in result.prompt.segments if segment.kind == "PF"]
    template = Prompt(tuple(pf(part.ids) for part in parts))
    prefill = engine.executor.run(template, Plan.make(template)).buffer
    at = [i for i, segment in enumerate(result.prompt.segments) if segment.kind == "PF"]
    for n, i in enumerate(at):
        got, expected = (
            buffer.extract(rows)
            for buffer, rows in (
                (result.buffer, result.prompt.rows(i)),
                (prefill, template.rows(n)),
            )
        )
        keep = len(got) - (i == at[-1])
        torch.testing.assert_close(got.k[:, :, :keep], expected.k[:, :, :keep], atol=2e-5, rtol=0)
        torch.testing.assert_close(got.v[:, :, :keep], expected.v[:, :, :keep], atol=0, rtol=0)


def test_a_full_rank_delta_is_exact_on_the_request_it_was_learned_from(
    model: TransformersAdapter,
) -> None:
    truth = serve(Engine(model, NonShared()), "r", 10)
    errors = {}
    cases: tuple[tuple[PFPolicy, int], ...] = (("rotate", 1), ("delta", 1), ("delta", 64))
    for name, rank in cases:
        engine = Engine(model, policy(NonShared(), name, rank))
        serve(engine, "r", 10)
        errors[name, rank] = largest(serve(engine, "again", 10), truth)
    assert errors["delta", 64] <= 1e-3
    assert errors["rotate", 1] > 1e-2
    assert errors["delta", 1] > 1e-2


def test_a_delta_learned_once_does_not_change(model: TransformersAdapter) -> None:
    """An entry never changes, so a checkpoint writes each name once."""
    engine = Engine(model, NonShared(pf_policy="delta"))
    serve(engine, "w", 10)
    before = engine.state()
    serve(engine, "r", 20)
    after = engine.state()
    assert list(after.entries) == list(before.entries)
    for name, entry in before.entries.items():
        assert all(after.entries[name][key] is entry[key] for key in entry)


def test_agents_and_templates_are_kept_apart(model: TransformersAdapter) -> None:
    """A known PF is served to the same turn after the same PF only."""
    engine = Engine(model, NonShared(pf_policy="rotate"))
    first, second = WORKFLOW.nodes
    query = {QUERY: random_ids(1, 9)}
    prompt = agent_prompt(WORKFLOW, first, query)
    system, q, glue = prompt.segments

    def executed(node: Any, *segments: Any) -> int:
        run = engine.session(WORKFLOW, "r").run
        return run(node, Prompt(segments), max_new_tokens=0).accounting.prompt.executed // LAYERS

    assert executed(first, *prompt.segments) == len(prompt)
    assert executed(first, *prompt.segments) == len(q) + 1
    assert executed(second, *prompt.segments) == len(prompt)
    other = pf(random_ids(99, len(system)))
    assert executed(first, other, q, glue) == len(prompt)
    assert executed(first, system, q, pf(random_ids(98, 4))) == len(q) + 4
    # The same glue with nothing before it is another segment.
    assert executed(first, q, glue) == len(q) + len(glue)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("method", [NonShared(), FullShared(), KVCMAS(tau=1)], ids=lambda m: m.name)
def test_state_round_trip(model: TransformersAdapter, method: Method, name: PFPolicy) -> None:
    engine, restored = (Engine(model, policy(method, name)) for _ in range(2))
    serve(engine, "w0", 10)
    serve(engine, "w1", 20)
    state = engine.state()
    restored.load_state(State(json.loads(json.dumps(state.meta)), state.entries))
    assert restored.state().meta == state.meta
    assert list(restored.state().entries) == list(state.entries)
    expected, got = serve(engine, "r", 30), serve(restored, "r", 30)
    for node in expected:
        assert torch.equal(got[node].first_logits, expected[node].first_logits)
        assert torch.equal(origin(got[node]), origin(expected[node]))


def test_state_of_method_and_store_do_not_mix(model: TransformersAdapter) -> None:
    engine = Engine(model, KVCMAS(pf_policy="delta", pf_rank=2))
    serve(engine, "w", 10)
    state = engine.state()
    assert {name[:2] for name in state.entries} == {"m.", "p."}
    assert engine.prefixes is not None
    stored = sum(
        tensor.nbytes
        for name, entry in state.entries.items()
        if name.startswith("p.")
        for tensor in entry.values()
    )
    assert engine.prefixes.nbytes == stored
    rotated = Engine(model, KVCMAS(pf_policy="rotate"))
    serve(rotated, "w", 10)
    assert rotated.prefixes is not None
    assert rotated.prefixes.nbytes < stored


def test_dense_keeps_no_store(model: TransformersAdapter) -> None:
    engine = Engine(model, NonShared())
    serve(engine, "w", 10)
    assert engine.prefixes is None
    assert engine.state().meta == {"method": {}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pf_policy": "rotated"}, "pf_policy='rotated' is not one of dense, rotate, delta"),
        ({"pf_rank": 0}, "pf_rank=0 must be a whole number of at least 1"),
        ({"pf_rank": True}, "pf_rank=True"),
    ],
)
def test_illegal_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NonShared(**settings)
