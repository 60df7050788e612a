"""One sample through a workflow: messages to segments, turns, observations, score."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.vision import Picture
from kvcmas.engine.workflow import QUERY, Node
from repro.runners.likelihood import Likelihood, likelihoods
from workloads.base import Choosing, Sample, Score, Workload
from workloads.chat import ChatFormat


@dataclass(frozen=True)
class Step:
    """One turn with its text, which includes what the reply was made to begin with.

    ``observe_s`` is what making its observation took; ``look_s`` what decoding and encoding the
    sample's picture took, once, before the first turn.
    """

    result: TurnResult
    text: str
    observation: str | None
    observe_s: float
    look_s: float = 0.0


@dataclass(frozen=True)
class Trajectory:
    """A sample's turns in order, its score, and the likelihoods of the replies asked about."""

    sample: Sample
    steps: tuple[Step, ...]
    score: Score
    likelihoods: tuple[Likelihood, ...] = ()


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
        max_new_tokens: limit of every turn.
        final_tokens: limit of the last turn, where it is another one.
        look: the picture of a sample, if it has one; it opens slot ``q``.
        before_turn: called before each turn (memory counters are reset there).
        after_turn: called with each turn's result.
    """

    engine: Engine
    workload: Workload
    chat: ChatFormat
    max_new_tokens: int
    final_tokens: int | None = None
    look: Callable[[Sample], Picture | None] = field(default=lambda sample: None)
    before_turn: Callable[[Node], None] = field(default=lambda node: None)
    after_turn: Callable[[TurnResult], None] = field(default=lambda result: None)

    def run(
        self,
        sample: Sample,
        replay: Replay | None = None,
        accept: bool | None = None,
        replies: Sequence[str] = (),
    ) -> Trajectory:
        """All turns of ``sample``.

        ``accept`` decides every gate beforehand: True accepts, False refuses (pool warm-up).
        ``replies`` are texts whose likelihood as the last agent's reply is wanted; a workload that
        chooses brings its own, and is scored by them.
        """
        choosing = self.workload if isinstance(self.workload, Choosing) and not replies else None
        texts = choosing.choices if choosing else replies
        wanted = [self.chat.encode_shared(text) for text in texts]
        start = self.engine.now()
        picture = self.look(sample)
        look_s = 0.0 if picture is None else self.engine.now() - start
        session = self.engine.session(self.workload.workflow, sample.id)
        fills = {QUERY: self._query(sample, picture)}
        visuals = {} if picture is None else {QUERY: (picture.at(0),)}
        nodes = self.workload.workflow.nodes
        steps: list[Step] = []
        for node in nodes:
            last = node is nodes[-1]
            filled = [s for s in self.workload.workflow.consumes(node) if s in fills]
            message = self.workload.message(node, filled)
            prompt = self.chat.segments(message, fills, visuals)
            self.before_turn(node)
            result = session.run(
                node,
                prompt,
                max_new_tokens=self._limit(wanted) if last else self.max_new_tokens,
                stop_ids=tuple(self.chat.stop_ids),
                output=None if replay is None else replay.outputs[node.name],
                force=None if accept is None else dict.fromkeys(prompt.shared(), accept),
                keep_buffer=last and any(len(reply) > 1 for reply in wanted),
            )
            self.after_turn(result)
            text = message.reply + self.chat.decode(result.output)
            start = time.perf_counter()
            if replay is not None:
                observation = replay.observations[node.name]
            else:
                observation = self.workload.observe(node, text, sample)
            observe_s = time.perf_counter() - start
            steps.append(Step(result, text, observation, observe_s, 0.0 if steps else look_s))
            if result.output:
                fills[node.out_slot] = result.output
            if observation:
                fills[node.obs_slot] = self.chat.encode_shared(observation)
        final = steps[-1]
        found = likelihoods(self.engine.executor, final.result, wanted)
        if choosing:
            score = choosing.choose(sample, final.text, [one.nats for one in found])
        else:
            score = self.workload.score(sample, final.text)
        return Trajectory(sample, tuple(steps), score, found)

    def _query(self, sample: Sample, picture: Picture | None) -> tuple[int, ...]:
        """The ids of slot ``q``: the picture's placeholders on a line of their own, then words."""
        if picture is None:
            return self.chat.encode_shared(sample.question)
        return (*picture.ids, *self.chat.encode_shared(f"\n{sample.question}"))

    def _limit(self, replies: Sequence[tuple[int, ...]]) -> int:
        """Tokens of the last turn, whose buffer needs room for the replies."""
        limit = self.max_new_tokens if self.final_tokens is None else self.final_tokens
        return max((limit, *map(len, replies)))
