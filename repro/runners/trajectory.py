"""One sample through a workflow: messages to segments, turns, observations, score."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import QUERY, Node
from workloads.base import Sample, Score, Workload
from workloads.chat import ChatFormat


@dataclass(frozen=True)
class Step:
    """One turn with its text; ``observe_s`` is what making its observation took."""

    result: TurnResult
    text: str
    observation: str | None
    observe_s: float


@dataclass(frozen=True)
class Trajectory:
    """A sample's turns in order, and its score."""

    sample: Sample
    steps: tuple[Step, ...]
    score: Score


@dataclass(frozen=True)
class Replay:
    """Forced outputs and observations per node: every method then sees identical ids."""

    outputs: Mapping[str, tuple[int, ...]]
    observations: Mapping[str, str | None]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Replay:
        """Replay ``trajectory``."""
        return cls(
            {s.result.node: s.result.output for s in trajectory.steps},
            {s.result.node: s.observation for s in trajectory.steps},
        )


@dataclass(frozen=True)
class Runner:
    """Runs samples of one workload on one engine.

    Attributes:
        before_turn: called before each turn (memory counters are reset there).
        after_turn: called with each turn's result.
    """

    engine: Engine
    workload: Workload
    chat: ChatFormat
    max_new_tokens: int
    before_turn: Callable[[Node], None] = field(default=lambda node: None)
    after_turn: Callable[[TurnResult], None] = field(default=lambda result: None)

    def run(
        self, sample: Sample, replay: Replay | None = None, accept: bool | None = None
    ) -> Trajectory:
        """All turns of ``sample``.

        ``accept`` decides every gate beforehand: True accepts, False refuses (pool warm-up).
        """
        session = self.engine.session(self.workload.workflow, sample.id)
        fills = {QUERY: self.chat.encode_shared(sample.question)}
        steps = []
        for node in self.workload.workflow.nodes:
            filled = [s for s in self.workload.workflow.consumes(node) if s in fills]
            prompt = self.chat.segments(self.workload.message(node, filled), fills)
            self.before_turn(node)
            result = session.run(
                node,
                prompt,
                max_new_tokens=self.max_new_tokens,
                stop_ids=tuple(self.chat.stop_ids),
                output=None if replay is None else replay.outputs[node.name],
                force=None if accept is None else dict.fromkeys(prompt.shared(), accept),
            )
            self.after_turn(result)
            text = self.chat.decode(result.output)
            start = time.perf_counter()
            if replay is not None:
                observation = replay.observations[node.name]
            else:
                observation = self.workload.observe(node, text)
            steps.append(Step(result, text, observation, time.perf_counter() - start))
            if result.output:
                fills[node.out_slot] = result.output
            if observation:
                fills[node.obs_slot] = self.chat.encode_shared(observation)
        return Trajectory(sample, tuple(steps), self.workload.score(sample, steps[-1].text))
