"""What is served: a trace, and others with the same agents for pools and for warming up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kvcmas.engine.segments import ids_sha256
from kvcmas.errors import UserError
from results.records import run_key
from traces.generator import GeneratorSettings, Seeds, generate, write_generated
from traces.schedule import readings
from traces.schema import Trace, TraceWorkflow, TurnKey, read_trace


@dataclass(frozen=True)
class Workload:
    """A trace and its companions.

    Attributes:
        layout: ``T``, ``L0`` or ``recorded``.
        shared: tokens of the query, ``output`` of an answer, both before scaling.
        workflows: what is measured.
        pool: workflows that fill pools: the same agents, other content.
        warm_up: one workflow that is discarded; no token run of it is served later.
        prompts: tokens of every prompt of a workflow, before scaling.
        sha256: of the measured workflows.
    """

    layout: str
    shared: int
    output: int
    scale: float
    topology: str
    workflows: tuple[TraceWorkflow, ...]
    pool: tuple[TraceWorkflow, ...]
    warm_up: TraceWorkflow
    prompts: tuple[int, ...]
    sha256: str

    @cached_property
    def pool_sha256(self) -> str:
        """Of the ids that fill pools."""
        turns = (turn for workflow in self.pool for turn in workflow.turns)
        return ids_sha256([i for turn in turns for i in (*turn.prompt.ids, *turn.output)])

    @property
    def agents(self) -> int:
        """Requests of a workflow."""
        return len(self.warm_up.turns)

    @property
    def requests(self) -> int:
        """Requests of a cell."""
        return sum(len(workflow.turns) for workflow in self.workflows)

    @property
    def name(self) -> str:
        """How tables call it."""
        scaled = "" if self.scale == 1 else f" / {self.scale:g}"
        return f"{self.layout} {self.shared}+{self.output}{scaled}"

    @property
    def positions(self) -> int:
        """Longest context, output included."""
        return max(len(turn.prompt) + len(turn.output) for w in self.workflows for turn in w.turns)


def generated(settings: GeneratorSettings, pool: int, folder: Path) -> Workload:
    """A generated trace, kept in ``folder``, with ``pool`` workflows for pools."""
    path = folder / f"{settings.layout}-{run_key(settings.origin)}.jsonl"
    trace = read_trace(path) if path.exists() else write_generated(path, settings)
    seeds, other = settings.seeds, max(vars(settings.seeds).values())
    learned = replace(seeds, shared=other + 1, output=other + 1)
    unscaled = replace(settings, scale=1.0).lengths
    fixed = unscaled.system + unscaled.shared + unscaled.private + unscaled.tail
    per_output = unscaled.glue + unscaled.output
    return Workload(
        layout=settings.layout,
        shared=settings.shared,
        output=settings.output,
        scale=settings.scale,
        topology=trace.header.topology,
        workflows=trace.workflows,
        pool=_some(replace(settings, seeds=learned), pool),
        warm_up=_some(replace(settings, seeds=Seeds.all(other + 2)), 1)[0],
        prompts=tuple(fixed + per_output * len(n.parents) for n in settings.graph.nodes),
        sha256=trace.header.sha256,
    )


def recorded(trace: Trace, pool: int, workflows: int) -> Workload:
    """A recorded trace: its first workflow warms up, ``pool`` more fill pools, then the measured.

    Raises:
        UserError: it has fewer workflows than that.
    """
    wanted = 1 + pool + workflows
    if len(trace.workflows) < wanted:
        raise UserError(
            f"the trace has {len(trace.workflows)} workflows; one to warm up, {pool} for pools and"
            f" {workflows} to measure make {wanted}"
        )
    chosen = trace.workflows[1 + pool : wanted]
    turns = [turn for workflow in chosen for turn in workflow.turns]
    first = [next(readings(workflow)) for workflow in chosen]
    return Workload(
        layout="recorded",
        shared=_mean([sum(reading.tokens for reading in read) for read in first]),
        output=_mean([len(turn.output) for turn in turns]),
        scale=1.0,
        topology=trace.header.topology,
        workflows=chosen,
        pool=trace.workflows[1 : 1 + pool],
        warm_up=trace.workflows[0],
        prompts=tuple(len(turn.prompt) for turn in turns),
        sha256=trace.header.sha256,
    )


def sources_of(workflow: TraceWorkflow) -> dict[str, tuple[TurnKey, ...]]:
    """For each turn, by node name, those whose caches it reads: the last holder of every slot."""
    holders: dict[str, str] = {}
    needs = {}
    for turn in workflow.turns:
        node = turn.node
        read = [s.slot for s in turn.segments if s.slot is not None and s.ids]
        held = dict.fromkeys(holders[slot] for slot in read if slot in holders)
        needs[node.name] = tuple(TurnKey(workflow.request, name) for name in held)
        holders |= {slot: node.name for slot in (*read, node.out_slot)}
    return needs


def _some(settings: GeneratorSettings, workflows: int) -> tuple[TraceWorkflow, ...]:
    return generate(replace(settings, workflows=workflows)) if workflows else ()


def _mean(values: Sequence[int]) -> int:
    return max(1, round(sum(values) / len(values)))
