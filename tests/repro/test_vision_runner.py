"""Samples with pictures through whole workflows, under every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from baselines.cacheblend import CacheBlend
from baselines.droidspeak import DroidSpeak
from baselines.epic import EPIC
from baselines.fullshared import FullShared
from baselines.graphflow import GraphFlow
from baselines.kvcomm import KVComm
from baselines.nonshared import NonShared
from baselines.relaycaching import RelayCaching
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Method
from kvcmas.engine.session import Engine
from kvcmas.engine.vision import Picture
from kvcmas.engine.workflow import QUERY, Node
from kvcmas.errors import UserError
from kvcmas.method.kvcmas import KVCMAS
from repro.models import load_image_processor, resolve
from repro.runners.record import record_trace
from repro.runners.replay import replay
from repro.runners.trajectory import Replay, Runner, Trajectory
from repro.runners.vision import Eyes, check_pictures, has_pictures
from traces.schema import read_trace
from workloads.base import Message, Sample, Slot, Text, Workload
from workloads.chat import ChatFormat
from workloads.mathvista import MathVista
from workloads.videomme import VideoMME
from workloads.vision_media import ImageBytes
from workloads.vision_samples import VisualSample

if TYPE_CHECKING:
    from conftest import Loaded

# A method with how many samples it needs before it reuses anything; pools want two anchors.
METHODS: tuple[tuple[Method, int], ...] = (
    (NonShared(), 1),
    (FullShared(), 1),
    (DroidSpeak(), 1),
    (CacheBlend(), 1),
    (RelayCaching(), 1),
    (EPIC(), 1),
    (GraphFlow(n_cal=1), 3),
    (KVComm(gamma=1.0), 3),
    (KVCMAS(chained=False, tau=1.0), 3),
    (KVCMAS(tau=1.0), 3),
)


def brief(node: Node, filled: Sequence[str]) -> Message:
    """As few words as a turn can have: bytes are tokens here."""
    user = [piece for slot in filled for piece in (Text(f"\n{slot}: "), Slot(slot))]
    return Message(node.name, (*user, Text("\nGo.")))


@dataclass(frozen=True)
class BriefPictures(MathVista):
    def message(self, node: Node, filled: Sequence[str]) -> Message:
        return brief(node, filled)


@dataclass(frozen=True)
class BriefClips(VideoMME):
    def message(self, node: Node, filled: Sequence[str]) -> Message:
        return brief(node, filled)


WORKLOADS: dict[str, Workload] = {
    "mathvista": BriefPictures(problems=3, topology="sequential"),
    "videomme": BriefClips(questions=3, frames=4, topology="sequential"),
}


@pytest.fixture(scope="module")
def eyes(tiny_llava: Loaded) -> Eyes:
    return Eyes.of(tiny_llava[0], resolve("tiny-llava-onevision"))


def runner(loaded: Loaded, eyes: Eyes, workload: Workload, method: Method) -> Runner:
    engine = Engine(TransformersAdapter(loaded[0]), method, reference_prefix=(2,))
    return Runner(engine, workload, ChatFormat.from_tokenizer(loaded[1]), 4, look=eyes)


@pytest.fixture(scope="module")
def dense(
    request: pytest.FixtureRequest, tiny_llava: Loaded, eyes: Eyes
) -> tuple[Workload, list[Trajectory]]:
    """Longest first: an anchor corrects only what it covers, and sizes of pictures differ."""
    workload = WORKLOADS[request.param]
    run = runner(tiny_llava, eyes, workload, NonShared())
    exact = [run.run(s) for s in workload.load("procedural", split="test", seed=0).samples]
    return workload, sorted(exact, key=lambda t: -len(t.steps[0].result.prompt))


@pytest.mark.parametrize("dense", ["mathvista"], indirect=True)
@pytest.mark.parametrize(("method", "count"), METHODS, ids=lambda value: getattr(value, "name", ""))
def test_every_method_runs_on_pictures(
    tiny_llava: Loaded,
    eyes: Eyes,
    dense: tuple[Workload, list[Trajectory]],
    method: Method,
    count: int,
) -> None:
    check(tiny_llava, eyes, dense, method, count)


@pytest.mark.parametrize("dense", ["videomme"], indirect=True)
@pytest.mark.parametrize(
    ("method", "count"), METHODS[3:4] + METHODS[-1:], ids=["select", "correct"]
)
def test_a_video_is_no_different(
    tiny_llava: Loaded,
    eyes: Eyes,
    dense: tuple[Workload, list[Trajectory]],
    method: Method,
    count: int,
) -> None:
    check(tiny_llava, eyes, dense, method, count)


def check(
    tiny_llava: Loaded,
    eyes: Eyes,
    dense: tuple[Workload, list[Trajectory]],
    method: Method,
    count: int,
) -> None:
    """On the same ids; every entry is accounted for; whoever reuses leaves rows unexecuted."""
    workload, exact = dense
    run = runner(tiny_llava, eyes, workload, replace(method))  # pools of its own
    reused = 0
    for trajectory in exact[:count]:
        again = run.run(trajectory.sample, Replay.of(trajectory))
        for step, other in zip(again.steps, trajectory.steps, strict=True):
            assert step.result.prompt.sha256 == other.result.prompt.sha256
            assert step.result.prompt.visuals
            entries = step.result.accounting.prompt
            assert entries.total == 4 * len(step.result.prompt)
            reused += entries.reused + entries.corrected
            assert np.isfinite(step.result.first_logits.numpy()).all()
    assert (reused > 0) == (method.name != "nonshared")


def test_a_picture_is_looked_at_once(tiny_llava: Loaded, eyes: Eyes) -> None:
    workload = WORKLOADS["mathvista"]
    sample = workload.load("procedural", split="test", seed=0).samples[0]
    looks: list[str] = []

    def look(asked: Sample) -> Picture | None:
        looks.append(asked.id)
        return eyes(asked)

    run = replace(runner(tiny_llava, eyes, workload, FullShared()), look=look)
    trajectory = run.run(sample)
    assert looks == [sample.id] and trajectory.steps[0].look_s > 0 == trajectory.steps[1].look_s
    queries = [s.result.prompt.segments for s in trajectory.steps]
    shared = [next(x for x in segments if x.slot == QUERY) for segments in queries]
    assert len({(q.ids, q.visuals) for q in shared}) == 1
    ((rows, _), *_) = trajectory.steps[0].result.prompt.visuals
    text = run.chat.tokenizer.decode(shared[0].ids[len(rows) :])
    assert text == f"\n{sample.question}"


def test_a_recorded_trace_replays_the_picture(
    tiny_llava: Loaded, eyes: Eyes, tmp_path: Path
) -> None:
    """Without looking again: what is replayed is what was recorded, down to the logits."""
    workload = WORKLOADS["mathvista"]
    samples = workload.load("procedural", split="test", seed=0).samples[:1]
    run = runner(tiny_llava, eyes, workload, NonShared())
    path = tmp_path / "t.jsonl"
    record_trace(path, run, samples, {})
    (workflow,) = read_trace(path).workflows
    engine = Engine(run.engine.executor.model, NonShared())
    for replayed, step in zip(
        replay(engine, workflow, "sequential"), run.run(samples[0]).steps, strict=True
    ):
        assert replayed.prompt.sha256 == step.result.prompt.sha256
        assert torch.equal(replayed.first_logits, step.result.first_logits)


def test_words_are_not_looked_at(eyes: Eyes, tiny_llava: Loaded) -> None:
    assert eyes(Sample("x", "How many?", "1")) is None
    assert not has_pictures([Sample("x", "How many?", "1")])
    assert has_pictures(WORKLOADS["videomme"].load("procedural", split="test", seed=0).samples)


def test_a_question_cannot_smuggle_in_a_picture(tiny_llava: Loaded, eyes: Eyes) -> None:
    """Text from outside that says <image> stays text."""
    chat = ChatFormat.from_tokenizer(tiny_llava[1])
    token = tiny_llava[0].config.image_token_index
    assert token not in chat.encode_shared("<image> <video>")
    assert chat.tokenizer.convert_tokens_to_ids("<image>") == token


def test_bad_pictures_are_named(eyes: Eyes, tmp_path: Path) -> None:
    asked = WORKLOADS["mathvista"].load("procedural", split="test", seed=0).samples[0]
    assert isinstance(asked, VisualSample)
    broken = VisualSample.of("b", ImageBytes("images/b.png", b"?"), asked.asked)
    for look in (lambda: check_pictures([asked, broken]), lambda: eyes(broken)):
        with pytest.raises(UserError, match=r"cannot read image images/b\.png"):
            look()


def test_a_model_without_eyes_is_refused(tiny_llama: Loaded) -> None:
    with pytest.raises(UserError, match="tiny-llama takes no images; give a LLaVA-OneVision"):
        load_image_processor(resolve("tiny-llama"))
