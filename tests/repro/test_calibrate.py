"""Budgets and offline profiles, found on requests set apart and stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.workflow import fully_connected
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro.cli import app
from repro.runners import calibrate as calibrating
from repro.runners import profile as profiling
from repro.runners.calibrate import HIGHEST, LOWEST, Calibrator, Gated, threshold_for
from repro.runners.offline import Requests
from tests.workflows import recorded
from traces.schema import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcmas.engine.session import Engine, TurnResult

WORKFLOW = fully_connected(3)
GATED = st.builds(
    Gated, st.integers(1, 50), st.none() | st.sampled_from([0.0, 1e-12]) | st.floats(0, 1)
)


def accepted(edges: list[Gated], threshold: float) -> float:
    taken = sum(e.tokens for e in edges if e.entropy is not None and e.entropy <= threshold)
    return taken / sum(e.tokens for e in edges)


@given(st.lists(GATED, min_size=1, max_size=30), st.floats(0, 1))
def test_the_threshold_accepts_as_near_to_rho_as_any_can(edges: list[Gated], rho: float) -> None:
    possible = [LOWEST, HIGHEST, *(max(e.entropy, LOWEST) for e in edges if e.entropy is not None)]
    best = min(abs(accepted(edges, t) - rho) for t in possible)
    found = threshold_for(edges, rho)
    # Entropies below the lowest threshold cannot be told apart, and no threshold refuses them all.
    tiny = sum(e.tokens for e in edges if e.entropy is not None and e.entropy <= LOWEST)
    slack = tiny / sum(e.tokens for e in edges)
    assert LOWEST <= found <= HIGHEST
    assert abs(accepted(edges, found) - rho) <= best + slack + 1e-12


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> TransformersAdapter:
    return TransformersAdapter(request.getfixturevalue("tiny_llama")[0])


@pytest.fixture(scope="module")
def requests(model: TransformersAdapter) -> Requests:
    workflows = recorded(model, WORKFLOW, 9, query=24, new_tokens=6)
    return Requests(model, WORKFLOW.name, workflows[5:], workflows[:5], (0,), {"model": "tiny"})


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a calibrator says; its results go to a folder of their own."""
    monkeypatch.setattr("repro.runners.offline.cache_dir", lambda: tmp_path)
    return []


@pytest.mark.parametrize("method", ["kvcmas", "kvcomm"])
def test_a_threshold_holds_rho_on_its_requests_and_is_found_again(
    requests: Requests, steps: list[str], method: str
) -> None:
    found = Calibrator(requests, steps.append).calibrate(method, {}, 0.5)
    assert found.rho == pytest.approx(0.5, abs=0.1)
    # What the curve says is what the chosen threshold does on a pool of the same state.
    threshold = {"kvcmas": "tau", "kvcomm": "gamma"}[method]
    engine = requests.engine(method, found.settings)
    engine.load_state(requests.warmed(method, {}).state())
    edges = [
        (entries.total, entries.executed)
        for result in requests.replay(engine)
        for segment, entries in result.accounting.shared.items()
        if segment not in result.first_seen
    ]
    assert found.rho == pytest.approx(1 - sum(e for _, e in edges) / sum(t for t, _ in edges))
    assert {p.threshold for p in found.curve} >= {HIGHEST, found.settings[threshold]}
    said = len(steps)
    assert Calibrator(requests, steps.append).calibrate(method, {}, 0.5) == found
    assert len(steps) == said


def test_the_first_guess_comes_from_few_of_many_requests(
    requests: Requests, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "FIRST", 2)
    seen: list[int] = []
    everything = Requests.replay

    def replay(self: Requests, engine: Engine) -> Iterator[TurnResult]:
        seen.append(len(self.held_out))
        return everything(self, engine)

    monkeypatch.setattr(Requests, "replay", replay)
    found = Calibrator(requests, steps.append).calibrate("kvcmas", {}, 0.5)
    assert seen == [2] + [5] * len(found.curve)
    assert found.rho == pytest.approx(0.5, abs=0.1)


def test_a_curve_never_falls(requests: Requests, steps: list[str]) -> None:
    curve = Calibrator(requests, steps.append).curve("kvcmas", {}, (LOWEST, HIGHEST))
    assert curve[0].rho < 0.5 < curve[1].rho
    with pytest.raises(UserError, match="no threshold"):
        Calibrator(requests, steps.append).curve("epic", {}, (0.1,))


@pytest.mark.parametrize("rule", ["search", "deviation"])
@pytest.mark.parametrize("method", ["droidspeak", "relaycaching"])
def test_a_profile_says_that_it_is_made_and_is_found_again(
    requests: Requests, steps: list[str], method: str, rule: profiling.Rule
) -> None:
    profiler = Calibrator(requests, steps.append).profiler
    found = profiler.profile(method, {}, 0.5, rule)
    assert f"{method}: no profile yet for rho 0.5 by {rule}, making it" in steps
    assert make_method(method, found.settings).settings()["pf_policy"] == "dense"
    if rule == "search":
        chosen = found.settings.get("span") or found.settings["blocks"][0]
        best = min(found.scores, key=found.scores.__getitem__)
        assert "-".join(map(str, chosen)) == best
    else:
        assert len(found.scores) == requests.adapter.spec.layers
    said = len(steps)
    assert Calibrator(requests, steps.append).profiler.profile(method, {}, 0.5, rule) == found
    assert len(steps) == said


def test_the_suffix_of_a_relaycaching_cell_is_kept(requests: Requests, steps: list[str]) -> None:
    found = Calibrator(requests, steps.append).calibrate("relaycaching", {"suffix": 0}, 0.5)
    assert found.settings["suffix"] == 0
    assert found.settings["ratio"] > 0


def test_graphflow_profiles_its_relations(requests: Requests, steps: list[str]) -> None:
    found = Calibrator(requests, steps.append).profiler.profile("graphflow", {}, 1.0)
    assert {">" in name for name in found.scores} == {True}
    assert all(value > 0 for value in found.scores.values())


@pytest.mark.parametrize(
    ("method", "rule", "message"),
    [
        ("kvcmas", "search", "chooses no layers"),
        ("fullshared", None, "no budget"),
        ("droidspeak", "guess", "rule='guess'"),
    ],
)
def test_what_cannot_be_calibrated_is_named(
    requests: Requests, steps: list[str], method: str, rule: profiling.Rule, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Calibrator(requests, steps.append).calibrate(method, {}, 0.5, rule)
    with pytest.raises(UserError, match="requests of its own"):
        replace(requests, held_out=())


def test_the_commands(
    tiny_llama: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    requests: Requests,
    steps: list[str],
    tmp_path: Path,
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(
        trace,
        [*requests.warm, *requests.held_out],
        kind="recorded",
        topology=WORKFLOW.name,
        vocab=requests.adapter.spec.vocab,
        origin={"bench": "test"},
    )
    shared = ["--model", "tiny-llama", "--trace", str(trace), "--warm", "4", "--calibration", "4"]
    shared += ["--out", str(tmp_path)]
    run = CliRunner().invoke
    told = run(app, ["calibrate", "--methods", "kvcmas,epic", "--curve", *shared])
    assert told.exit_code == 0, told.output
    assert "closed form" in told.output
    assert "realised rho by tau" in told.output
    content = json.loads((tmp_path / "calibration-0.8.json").read_text())
    assert len(content["whole_curves"]["kvcmas"]) > 8
    told = run(app, ["profile", "droidspeak", "--target-rho", "0.75", *shared])
    assert told.exit_code == 0, told.output
    assert "blocks=" in told.output
    refused = run(app, ["profile", "kvcmas", *shared])
    assert isinstance(refused.exception, UserError)
    assert "no offline phase" in str(refused.exception)
