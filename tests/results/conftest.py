"""Synthetic records: every field has a value, a test changes those it is about."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from results.records import FidelityRecord, Run, RunInfo, SampleRecord, TurnRecord, run_key

LAYERS = 4

InfoFactory = Callable[..., RunInfo]
TurnFactory = Callable[..., TurnRecord]
FidelityFactory = Callable[..., FidelityRecord]
SampleFactory = Callable[..., SampleRecord]
RunFactory = Callable[..., Run]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _info(**changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "created": "2026-11-29T12:00:00Z",
        "kind": "accuracy",
        "bench": "gsm8k",
        "data": "local",
        "data_sha256": sha("data"),
        "method": "kvcmas",
        "settings": {"rank": 32, "tau": 0.3},
        "model": "tiny-llama",
        "model_revision": "r1",
        "dtype": "float32",
        "engine": "transformers",
        "attention": "sdpa",
        "device": "cpu",
        "hardware": "Some CPU",
        "seed": 0,
        "sample_order_sha256": sha("order"),
        "n": 2,
        "max_new_tokens": 32,
        "workflow": "sequential",
        "profile": "smoke",
        "environment": {"git_commit": "abc1234", "packages": {"numpy": "2"}},
        "command": "repro accuracy --bench gsm8k",
    } | changes
    values.setdefault("run_key", run_key({key: str(value) for key, value in values.items()}))
    return RunInfo.model_validate(values)


def _edge(tokens: int = 5, executed: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "slot": "q",
        "source": "A0",
        "target": "A1",
        "tokens": tokens,
        "action": "correct",
        "reason": "entropy 0.1 <= 0.3",
        "entropy": 0.1,
        "shared_entries": LAYERS * tokens,
        "executed_entries": executed,
        "first": False,
    } | changes


def _executed(sample_index: int, edges: tuple[dict[str, Any], ...], tokens: int) -> dict[str, Any]:
    """Fields every turn has; rows outside the edges are dense."""
    executed = LAYERS * tokens - sum(e["shared_entries"] - e["executed_entries"] for e in edges)
    return {
        "run_key": "0" * 16,
        "sample_id": f"s{sample_index}",
        "sample_index": sample_index,
        "node": "A1",
        "turn_index": 1,
        "prompt_sha256": sha("prompt"),
        "prompt_tokens": tokens,
        "ttft_s": 0.5,
        "e2e_s": 1.0,
        "times_s": {"prefill": 0.4},
        "layers": LAYERS,
        "entries": {
            "reused": 0,
            "corrected": LAYERS * tokens - executed,
            "executed": executed,
            "prefix_hit": 0,
        },
        "touched_rows": tokens,
        "executed_flops": 1000,
        "reference_tokens": 0,
        "edges": edges,
        "source_bytes": 10,
        "pool_bytes": 1_500_000,
        "pool_entries": 1,
        "reference_bytes": 0,
    }


def _turn(
    sample_index: int = 0, edges: tuple[dict[str, Any], ...] = (), tokens: int = 10, **changes: Any
) -> TurnRecord:
    served = {
        "output_tokens": 3,
        "output_ids_sha256": sha("output"),
        "finish": "stop",
        "peak_memory_bytes": 2_000_000_000,
    }
    return TurnRecord.model_validate(_executed(sample_index, edges, tokens) | served | changes)


def _fidelity_edge(
    k: float | tuple[float, ...] = 0.0, v: float | tuple[float, ...] = 0.0, **changes: Any
) -> dict[str, Any]:
    """An edge with errors per layer; one number stands for all layers."""
    edge = _edge(**changes)
    layers = LAYERS if edge["tokens"] else 0
    errors = {
        name: [error] * layers if isinstance(error, float) else error
        for name, error in (("k_error", k), ("v_error", v))
    }
    return errors | edge


def _fidelity(
    sample_index: int = 0,
    edges: tuple[dict[str, Any], ...] = (),
    kl: tuple[float, ...] = (0.0,),
    tokens: int = 10,
    **changes: Any,
) -> FidelityRecord:
    """A replayed turn; its prompt depends on sample and position alone, as in a recorded one."""
    values = _executed(sample_index, edges, tokens)
    position = changes.get("turn_index", values["turn_index"])
    replayed = {
        "prompt_sha256": sha(f"prompt {sample_index} {position}"),
        "last": False,
        "warm": False,
        "row_layers": values["entries"]["executed"],
        "answer_kl": kl,
        "answer_agree": [True] * len(kl),
    }
    return FidelityRecord.model_validate(values | replayed | changes)


def _sample(sample_index: int = 0, **changes: Any) -> SampleRecord:
    values: dict[str, Any] = {
        "run_key": "0" * 16,
        "sample_id": f"s{sample_index}",
        "sample_index": sample_index,
        "correct": True,
        "extracted": "42",
        "expected": "42",
        "failure": None,
        "outputs": {"A1": "The answer is 42."},
        "e2e_s": 2.0,
        "ttft_mean_s": 0.5,
    } | changes
    return SampleRecord.model_validate(values)


def _run(
    correct: tuple[bool | None, ...] = (True, False),
    turns: tuple[TurnRecord, ...] | None = None,
    **info: Any,
) -> Run:
    """A run that answered ``correct``, with one default turn per sample unless given."""
    described = _info(**({"n": len(correct)} | info))
    if turns is None:
        turns = tuple(_turn(index) for index in range(len(correct)))
    samples = tuple(_sample(index, correct=value) for index, value in enumerate(correct))
    return Run(described, turns, samples)


def _replay(turns: tuple[FidelityRecord, ...] = (), **info: Any) -> Run:
    """A complete fidelity run of the given turns."""
    indices = sorted({turn.sample_index for turn in turns})
    described = _info(**({"kind": "fidelity", "n": max(len(indices), 1)} | info))
    samples = tuple(_sample(index, correct=None) for index in indices)
    return Run(described, (), samples, fidelity=turns)


@pytest.fixture
def make_info() -> InfoFactory:
    return _info


@pytest.fixture
def make_edge() -> Callable[..., dict[str, Any]]:
    return _edge


@pytest.fixture
def make_turn() -> TurnFactory:
    return _turn


@pytest.fixture
def make_fidelity_edge() -> Callable[..., dict[str, Any]]:
    return _fidelity_edge


@pytest.fixture
def make_fidelity() -> FidelityFactory:
    return _fidelity


@pytest.fixture
def make_replay() -> Callable[..., Run]:
    return _replay


@pytest.fixture
def make_sample() -> SampleFactory:
    return _sample


@pytest.fixture
def make_run() -> RunFactory:
    return _run
