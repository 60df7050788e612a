"""Workflows over random token ids, for tests of methods on the tiny models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from baselines.nonshared import NonShared
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.cache import SegmentCache
from kvcmas.engine.contract import Held
from kvcmas.engine.segments import Prompt, Segment, pf, ph
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import QUERY, Node, Workflow
from traces.schema import TraceTurn, TraceWorkflow

Ids = tuple[int, ...]
VOCAB = 250  # ordinary ids of the tiny models start at 3


def random_ids(seed: int, count: int) -> Ids:
    """``count`` ids that depend on ``seed`` only; a longer run starts with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return tuple((3 + torch.randint(VOCAB, (count,), generator=generator)).tolist())


def agent_prompt(
    workflow: Workflow, node: Node, texts: Mapping[str, Ids], *, system: int = 12, tail: int = 5
) -> Prompt:
    """PF of the agent, then every slot that ``texts`` holds, each followed by glue.

    The agent's own ids are the same for every request. ``system`` is the length of the first PF,
    ``tail`` that of the last (0 ends the prompt with a PH).
    """
    held = [slot for slot in workflow.consumes(node) if slot in texts]
    own = 1000 * (node.agent + 1)
    segments: list[Segment] = [pf(random_ids(own, system + 2 * node.agent))]
    for n, slot in enumerate(held, 1):
        last = n == len(held)
        segments += [ph(slot, texts[slot]), pf(random_ids(own + n, tail if last else 4))]
    return Prompt(tuple(segments))


def play(
    engine: Engine,
    workflow: Workflow,
    request: str,
    query: Ids,
    *,
    outputs: Mapping[str, Ids] | None = None,
    new_tokens: int = 8,
    force: bool | None = None,
    tail: int = 5,
) -> dict[str, TurnResult]:
    """One request through all turns, by node name.

    Args:
        outputs: forced output ids by node name (replay); None decodes ``new_tokens`` greedily.
        force: the decision forced on every PH of every turn.
    """
    session, texts = engine.session(workflow, request), {QUERY: query}
    results = {}
    for node in workflow.nodes:
        prompt = agent_prompt(workflow, node, texts, tail=tail)
        results[node.name] = session.run(
            node,
            prompt,
            max_new_tokens=new_tokens,
            output=None if outputs is None else outputs[node.name],
            force={} if force is None else dict.fromkeys(prompt.shared(), force),
        )
        texts[node.out_slot] = results[node.name].output
    return results


def recorded(
    model: TransformersAdapter, workflow: Workflow, count: int, *, query: int, new_tokens: int
) -> tuple[TraceWorkflow, ...]:
    """NonShared trajectories of ``count`` requests, each query a token longer than the last."""
    found = []
    for i in range(count):
        ids = random_ids(70 + i, query + i)
        turns = play(Engine(model, NonShared()), workflow, f"r{i}", ids, new_tokens=new_tokens)
        kept = tuple(
            TraceTurn.of(node, turns[node.name].prompt, turns[node.name].output)
            for node in workflow.nodes
        )
        found.append(TraceWorkflow(request=f"r{i}", turns=kept))
    return tuple(found)


@dataclass(frozen=True)
class FixedSources:
    """Sources by segment index, to plan one turn without a session."""

    caches: Mapping[int, Held] = field(default_factory=dict)
    references: Mapping[int, SegmentCache] = field(default_factory=dict)

    def held(self, segment: int) -> Held | None:
        return self.caches.get(segment)

    def reference(self, segment: int) -> SegmentCache:
        return self.references[segment]
