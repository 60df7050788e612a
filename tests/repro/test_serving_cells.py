"""Budgets, bounds, rates, memory and pools of serving cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from baselines.selective import Selective
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.errors import UserError
from kvcmas.registry import find_method, make_method
from repro.runners.serving.budgets import budget, cell_bound, schedule
from repro.runners.serving.capacity import A100_BF16, UTILISATION, paper_capacity
from repro.runners.serving.memory import parse_bytes, pool_bytes
from repro.runners.serving.pools import check_reset, fill, has_pool, learns, load_pool, save_pool
from repro.runners.serving.workload import generated, recorded
from traces import GeneratorSettings, generate, realised_rho, work_bound
from traces.bounds import later_pf_share

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SELECTIVE = {0.8: 0.9, 0.6: 0.8}
LAYERS = 12
TRACE = generate(GeneratorSettings(vocab=200, shared=32_768, scale=64, workflows=17))


@pytest.fixture(scope="module")
def adapter(tiny_llama: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> TransformersAdapter:
    return TransformersAdapter(tiny_llama[0])


@pytest.mark.parametrize(
    ("method", "kind", "rho"),
    [
        ("nonshared", "none", None),
        ("fullshared", "all", 1.0),
        ("droidspeak", "budget", 0.9),
        ("cacheblend", "budget", 0.9),
        ("relaycaching", "budget", 0.9),
        ("epic", "budget", 0.9),
        ("graphflow", "controlled", 0.8),
        ("kvcomm", "controlled", 0.8),
        ("kvcmas", "controlled", 0.8),
    ],
)
def test_selective_methods_face_delta_methods_at_the_paired_ratio(
    method: str, kind: str, rho: float | None
) -> None:
    chosen = budget(method, 0.8, SELECTIVE, "controlled", LAYERS, TRACE)
    assert (chosen.kind, chosen.rho) == (kind, rho)
    made, settings = schedule(TRACE, chosen, seed=3)
    assert make_method(method, chosen.settings)
    if made is not None:
        expected = rho if kind == "controlled" else 1.0
        assert realised_rho(made, TRACE).transitions == pytest.approx(expected, abs=0.01)
        assert settings["seed"] == 3


def test_live_gates_decide_themselves() -> None:
    chosen = budget("kvcmas", 0.8, SELECTIVE, "live", LAYERS, TRACE)
    made, settings = schedule(TRACE, chosen, seed=0)
    assert (chosen.kind, made, settings) == ("gate", None, {})
    assert cell_bound(TRACE, chosen, made, make_method("kvcmas")) is None


@pytest.mark.parametrize(
    ("rho", "layers", "message"), [(0.7, 12, "goes with rho=0.7"), (0.8, 4, "cannot realise")]
)
def test_a_ratio_out_of_reach_is_one_clear_line(rho: float, layers: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        budget("relaycaching", rho, SELECTIVE, "controlled", layers, TRACE)


def bound(method: str, **settings: Any) -> float:
    chosen = budget(method, 0.8, SELECTIVE, "controlled", LAYERS, TRACE)
    made, _ = schedule(TRACE, chosen, seed=0)
    found = cell_bound(TRACE, chosen, made, make_method(method, {**chosen.settings, **settings}))
    assert found is not None
    return found


def test_bounds_rank_as_the_work_does() -> None:
    assert bound("nonshared") == 1.0
    assert bound("kvcmas") == pytest.approx(work_bound(4, 0.8, later_pf_share(TRACE)), rel=0.02)
    corrected, dense = (
        bound("kvcmas", chained=False, first_turn=first) for first in ("corrected", "dense")
    )
    assert bound("graphflow") == corrected, "both correct a context-free reference"
    assert bound("kvcmas") > corrected > dense
    assert bound("fullshared") > bound("cacheblend") > bound("kvcmas")
    assert issubclass(find_method("cacheblend"), Selective)


def test_the_papers_capacity_is_the_documented_formula() -> None:
    capacities = [
        paper_capacity([1024 + shared + 512 + 5 + 144 * hop for hop in range(4)])
        for shared in (2048, 8192, 32_768)
    ]
    assert capacities == pytest.approx([2.741, 0.946, 0.196], abs=0.001)
    # 8 billion parameters times two operations and a token, without attention, bound it.
    assert capacities[0] < A100_BF16 * UTILISATION / (2 * 6.5e9 * 3600)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("kvcmas", {"capacity": 2}),
        ("kvcmas", {"capacity": 2, "base": "shared", "rank_base": None}),
        ("kvcmas", {"capacity": 2, "chained": False}),
        ("kvcmas", {"capacity": 2, "chained": False, "first_turn": "dense"}),
        ("kvcomm", {"capacity": 2}),
        ("kvcomm", {"capacity": 2, "first_turn": "dense"}),
        ("graphflow", {"n_cal": 9}),
        ("graphflow", {"n_cal": 9, "first_turn": "dense"}),
        ("cacheblend", {}),
    ],
)
def test_the_memory_model_is_what_full_pools_hold(
    adapter: TransformersAdapter, method: str, settings: dict[str, Any]
) -> None:
    made = make_method(method, settings)
    trace = generate(GeneratorSettings(vocab=200, scale=64, workflows=3))
    state = fill(adapter, {"it": made}, trace, "fully_connected", (3,))["it"]
    assert pool_bytes(made, trace[0], adapter.spec) == state.nbytes
    assert learns(made) == (method != "cacheblend")


def test_methods_learn_together_what_they_would_learn_alone(
    adapter: TransformersAdapter, tmp_path: Path
) -> None:
    trace = generate(GeneratorSettings(vocab=200, scale=128, workflows=2))
    specs = {
        "chained": ("kvcmas", {}),
        "non-chained": ("kvcmas", {"chained": False}),
        "graphflow": ("graphflow", {}),
        "kvcomm": ("kvcomm", {}),
    }

    def states(names: tuple[str, ...]) -> dict[str, Any]:
        methods = {name: make_method(*specs[name]) for name in names}
        return fill(adapter, methods, trace, "fully_connected", (3,))

    together = states(tuple(specs))
    for name in specs:
        alone = states((name,))[name]
        assert alone.meta == together[name].meta
        for entry, tensors in alone.entries.items():
            for key, tensor in tensors.items():
                torch.testing.assert_close(tensor, together[name].entries[entry][key])
    save_pool(tmp_path / "pool", 2, together["kvcomm"])
    kept = load_pool(tmp_path / "pool")
    assert has_pool(tmp_path / "pool", 2) and not has_pool(tmp_path / "pool", 3)
    assert kept is not None and kept.entries.keys() == together["kvcomm"].entries.keys()
    check_reset(kept, together["kvcomm"])
    with pytest.raises(RuntimeError, match="not 0"):
        check_reset(kept, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80 * 10**9), ("16GiB", 16 * 2**30), ("1.5mb", 1_500_000), ("4096", 4096)],
)
def test_amounts_of_memory(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "much", "-1GB", "80 XB", "0"])
def test_no_amount_of_memory_is_one_clear_line(text: str) -> None:
    with pytest.raises(UserError, match="no amount of memory"):
        parse_bytes(text)


def test_pools_and_warm_up_share_the_agents_and_no_content(tmp_path: Path) -> None:
    made = generated(GeneratorSettings(vocab=50_000, scale=64, workflows=2), 2, tmp_path)
    again = generated(GeneratorSettings(vocab=50_000, scale=64, workflows=2), 2, tmp_path)
    assert made.sha256 == again.sha256 and len(list(tmp_path.iterdir())) == 1
    ids = [made.workflows[0].turns[0], made.pool[0].turns[0], made.warm_up.turns[0]]
    system, query = ([turn.segments[i].ids for turn in ids] for i in (0, 1))
    assert system[0] == system[1] != system[2]
    assert len(set(query)) == 3
    assert (made.requests, made.agents, made.name) == (8, 4, "T 2048+128 / 64")
    assert sum(made.prompts) == 4 * (1024 + 2048 + 512 + 5) + 6 * 144


def test_a_recorded_trace_is_divided_up(tmp_path: Path) -> None:
    from traces import write_generated

    trace = write_generated(tmp_path / "t.jsonl", GeneratorSettings(vocab=50, scale=64))
    made = recorded(trace, pool=3, workflows=13)
    assert made.warm_up == trace.workflows[0]
    assert made.pool == trace.workflows[1:4] and made.workflows == trace.workflows[4:]
    assert (made.layout, made.shared, made.output) == ("recorded", 32, 2)
    with pytest.raises(UserError, match="has 17 workflows"):
        recorded(trace, pool=3, workflows=14)
