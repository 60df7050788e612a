"""What no workflow may break: no crash, the same ids for all methods, all entries accounted for."""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Method, State
from kvcmas.engine.segments import Prompt, Segment, ids_sha256, pf, ph
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import Node, Workflow

GROUP = "kvcmas.methods"
PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
LAYERS = 4

# Settings beside the defaults, to reach what those leave unused.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "nonshared": [{"pf_policy": "rotate"}],
    "fullshared": [{"pf_policy": "delta", "pf_rank": 2}],
    "droidspeak": [{"blocks": ((0, 1), (3, 3))}],
    "cacheblend": [{"ratio": 0.5, "scope": "segment", "gradual": True}],
    "relaycaching": [{"span": (1, 2, 3), "ratio": 0.5}, {"span": (0, 1, 2)}],
    "epic": [{"tokens": 2}],
    "graphflow": [{"n_cal": 1, "dense_share": 0.3, "sparsity": 0.5}],
    "kvcomm": [
        {"gamma": 1, "capacity": 2, "capacity_rule": "authors"},
        {
            "gamma": 1,
            "base": "producer",
            "gate_scope": "prompt",
            "prefixes": "offset",
        },
    ],
    "kvcmas": [
        {"tau": 1, "capacity": 1, "base": "shared", "rank_delta": 2},
        {"tau": 1, "capacity": 2, "chained": False, "coverage": "per_token"},
        {"tau": 1, "weights": "token_knn", "factorisation": "randomised", "pf_policy": "delta"},
    ],
}


def registered() -> dict[str, EntryPoint]:
    """Methods by name, as the project declares them and as an installation announces them."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"][GROUP].items()
    installed = {point.name: point for point in entry_points(group=GROUP)}
    return {name: EntryPoint(name, value, GROUP) for name, value in declared} | installed


def cases() -> list[Any]:
    return [
        pytest.param(point, variant, id=f"{name}-{n}" if n else name)
        for name, point in registered().items()
        for n, variant in enumerate([{}, *VARIANTS.get(name, [])])
    ]


@functools.cache
def model() -> TransformersAdapter:
    """Random Llama that is as small as it gets: grouped-query attention, 4 layers."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TransformersAdapter(LlamaForCausalLM(config).eval())


Ids = tuple[int, ...]
# Few ids and short runs: repeated texts, empty ones and single tokens are common.
ids = st.lists(st.integers(1, 4), max_size=5).map(tuple)


@dataclass(frozen=True)
class TurnCase:
    """One turn: its prompt, its output and decisions forced by segment."""

    node: Node
    prompt: Prompt
    output: Ids
    force: Mapping[int, bool]


@dataclass(frozen=True)
class Script:
    """A workflow and, for a few requests through it, all turns."""

    workflow: Workflow
    requests: tuple[tuple[TurnCase, ...], ...]


@st.composite
def workflows(draw: st.DrawFn) -> Workflow:
    """2 to 6 agents in one or two rounds, every turn reading any of those before it."""
    agents = draw(st.integers(2, 6))
    rounds = draw(st.integers(1, 2)) if agents < 5 else 1
    nodes = list[Node]()
    for round_ in range(1, rounds + 1):
        for agent in range(agents):
            parents = [node.name for node in nodes if draw(st.booleans())]
            nodes.append(Node(agent, round_, tuple(parents)))
    return Workflow("random", tuple(nodes))


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Texts may be empty, may repeat and may be named twice in a prompt; PF recur by agent."""
    workflow = draw(workflows())
    glue = {node.name: (draw(ids), draw(ids), draw(ids)) for node in workflow.nodes}
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        texts, turns = {"q": draw(ids)}, []
        for node in workflow.nodes:
            system, between, tail = glue[node.name]
            segments: list[Segment] = [pf(system)]
            for slot in workflow.consumes(node):
                if slot in texts:
                    again = draw(st.sampled_from((1, 1, 1, 2)))
                    segments += [ph(slot, texts[slot]), pf(between)] * again
            segments.append(pf(tail))
            if not any(segments):
                segments.append(pf((5,)))
            prompt, output = Prompt(tuple(segments)), draw(ids)
            choice = st.sampled_from((None, None, True, False))
            choices = {i: draw(choice) for i in prompt.shared()}
            force = {i: forced for i, forced in choices.items() if forced is not None}
            turns.append(TurnCase(node, prompt, output, force))
            texts[node.out_slot] = output
            if draw(st.booleans()):
                texts[node.obs_slot] = draw(ids)
        requests.append(tuple(turns))
    return Script(workflow, tuple(requests))


def perform(engine: Engine, script: Script) -> list[TurnResult]:
    results = []
    for n, turns in enumerate(script.requests):
        session = engine.session(script.workflow, f"r{n}")
        for turn in turns:
            results.append(
                session.run(
                    turn.node,
                    turn.prompt,
                    max_new_tokens=0,
                    output=turn.output,
                    force=turn.force,
                )
            )
    return results


def check(method: Method, turn: TurnCase, result: TurnResult) -> None:
    tokens = [token for segment in turn.prompt.segments for token in segment.ids]
    assert result.prompt.sha256 == ids_sha256(tokens)
    assert result.first_logits.isfinite().all()
    assert result.continuation_logits is None or result.continuation_logits.isfinite().all()

    account = result.accounting
    whole = account.prompt
    counted = whole.reused + whole.corrected + whole.executed + whole.prefix_hit
    assert counted == LAYERS * len(tokens)
    shared = list(turn.prompt.shared())
    assert list(account.shared) == shared
    for i, part in account.shared.items():
        counted = part.reused + part.corrected + part.executed + part.prefix_hit
        assert counted == LAYERS * len(turn.prompt.segments[i])
    for name in ("reused", "corrected", "executed", "prefix_hit"):
        assert sum(getattr(p, name) for p in account.shared.values()) <= getattr(whole, name)
    assert account.touched_rows <= sum(len(turn.prompt.segments[i]) for i in shared)
    assert whole.executed <= account.row_layers <= LAYERS * len(tokens)
    assert whole.executed >= LAYERS  # the last row is
    assert account.flops > 0

    assert [decision.segment for decision in result.decisions] == shared
    for decision in result.decisions:
        part = account.shared[decision.segment]
        if decision.action == "dense":
            assert part.executed == part.total
        if decision.action == "correct" and method.pf_policy == "dense":
            assert part.executed in (0, LAYERS)  # the prompt's last row, if it lies in there
        if turn.force.get(decision.segment) is False:
            assert decision.action == "dense"
        assert decision.entropy is None or 0 <= decision.entropy <= 1
        assert decision.entropy is None or math.isfinite(decision.entropy)


@pytest.mark.parametrize(("point", "variant"), cases())
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(script=scripts())
def test_any_workflow(point: EntryPoint, variant: Mapping[str, Any], script: Script) -> None:
    method: Method = point.load()(**variant)
    engine = Engine(model(), method)
    results = perform(engine, script)
    turns = [turn for request in script.requests for turn in request]
    for turn, result in zip(turns, results, strict=True):
        check(method, turn, result)
    state = engine.state()
    restored = Engine(model(), point.load()(**variant))
    restored.load_state(State(json.loads(json.dumps(state.meta)), state.entries))
    assert restored.state().meta == state.meta


def test_the_methods_of_the_paper_are_registered() -> None:
    """Whatever is registered is tested above; these must be."""
    paper = {"nonshared", "fullshared", "droidspeak", "cacheblend", "relaycaching"}
    assert paper | {"graphflow", "kvcomm", "kvcmas", "epic"} <= set(registered())
    for name, point in registered().items():
        assert issubclass(point.load(), Method)
        assert point.load().name == name
