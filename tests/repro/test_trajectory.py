"""Running samples: token limits, observations, and likelihoods of replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from baselines.fullshared import FullShared
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Method
from kvcmas.engine.session import Engine
from kvcmas.engine.workflow import Node, Workflow, fully_connected
from repro.runners.likelihood import likelihoods
from repro.runners.trajectory import Replay, Runner
from workloads.base import Dataset, Message, Sample, Score, Slot, Text
from workloads.chat import ChatFormat

if TYPE_CHECKING:
    from conftest import Loaded

SAMPLE = Sample("s", "One and one?", "2")


@dataclass
class Two:
    """Two agents; the first one's text is observed."""

    name: str = "two"
    agents: tuple[str, ...] = ("One", "Two")
    workflow: Workflow = field(default_factory=lambda: fully_connected(2))

    def load(self, data: str | Path, *, split: str, seed: int) -> Dataset:
        raise NotImplementedError

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        user = [piece for slot in filled for piece in (Text(f"\n{slot}: "), Slot(slot))]
        return Message(f"You are {node.name}.", (*user, Text("\nGo.")))

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        return f"seen for {sample.id}" if node.agent == 0 else None

    def score(self, sample: Sample, final_output: str) -> Score:
        return Score(False, final_output, sample.answer)


@dataclass
class Letters(Two):
    choices: tuple[str, ...] = ("A", "B")

    def choose(self, sample: Sample, final_output: str, likelihoods: Sequence[float]) -> Score:
        best = max(zip(likelihoods, self.choices, strict=True))
        return Score(False, best[1], sample.answer, notes={"likelihoods": list(likelihoods)})


def runner(
    loaded: Loaded,
    workload: Two,
    method: Method | None = None,
    max_new_tokens: int = 8,
    final_tokens: int | None = None,
) -> Runner:
    engine = Engine(TransformersAdapter(loaded[0]), method or NonShared())
    chat = ChatFormat.from_tokenizer(loaded[1])
    return Runner(engine, workload, chat, max_new_tokens, final_tokens)


def test_the_last_turn_may_have_a_limit_of_its_own(tiny_llama: Loaded) -> None:
    steps = runner(tiny_llama, Two(), max_new_tokens=9, final_tokens=3).run(SAMPLE).steps
    assert [s.result.finish for s in steps] == ["length", "length"]
    assert [len(s.result.output) for s in steps] == [9, 3]


def test_the_observation_knows_the_sample(tiny_llama: Loaded) -> None:
    steps = runner(tiny_llama, Two()).run(SAMPLE).steps
    assert [s.observation for s in steps] == ["seen for s", None]
    slots = [s.slot for s in steps[1].result.prompt.segments if s.slot]
    assert slots == ["q", "out0", "obs0"]


def test_a_text_has_the_beginning_that_its_reply_was_given(tiny_llama: Loaded) -> None:
    class Begun(Two):
        def message(self, node: Node, filled: Sequence[str]) -> Message:
            return replace(super().message(node, filled), reply="So: ")

    run = runner(tiny_llama, Begun())
    for step in run.run(SAMPLE).steps:
        assert step.text == f"So: {run.chat.decode(step.result.output)}"


@pytest.mark.parametrize("method", [NonShared(), FullShared()], ids=["dense", "reused"])
def test_likelihoods_are_those_of_a_run_that_is_forced_to_reply_so(
    tiny_llama: Loaded, method: Method
) -> None:
    """A second path: the reply as forced output, with the logits the session returns for it."""
    replies = ("The answer is four.", "B", "No")
    run = runner(tiny_llama, Two(), method, max_new_tokens=4)
    free = run.run(SAMPLE, replies=replies)
    outputs = {s.result.node: s.result.output for s in free.steps}
    observations = {s.result.node: s.observation for s in free.steps}
    for text, found in zip(replies, free.likelihoods, strict=True):
        ids = run.chat.encode_shared(text)
        forced = run.run(SAMPLE, Replay({**outputs, "A1": ids}, observations)).steps[-1].result
        assert forced.continuation_logits is not None
        rows = torch.cat((forced.first_logits[None], forced.continuation_logits[:-1]))
        tokens = torch.tensor(ids)
        expected = rows.double().log_softmax(-1).gather(1, tokens[:, None]).sum()
        assert found.nats == pytest.approx(float(expected), abs=1e-4)
        assert found.greedy == bool((rows.argmax(-1) == tokens).all())


def test_what_greedy_decoding_says_is_greedy_and_nothing_else(tiny_llama: Loaded) -> None:
    run = runner(tiny_llama, Two(), max_new_tokens=1)
    result = run.run(SAMPLE).steps[-1].result
    other = (result.output[0] + 1) % len(run.chat.tokenizer)
    found = likelihoods(run.engine.executor, result, (result.output, (other,)))
    assert [one.greedy for one in found] == [True, False]
    assert found[1].nats < found[0].nats < 0


def test_a_workload_that_chooses_is_scored_by_likelihood(tiny_llama: Loaded) -> None:
    trajectory = runner(tiny_llama, Letters()).run(SAMPLE)
    nats = [one.nats for one in trajectory.likelihoods]
    assert trajectory.score.notes == {"likelihoods": nats}
    assert trajectory.score.extracted == ("A" if nats[0] > nats[1] else "B")
