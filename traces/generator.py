"""Generated traces: random token ids in the layouts that serving is measured on.

Layout ``T`` follows the authors' public serving harness (paper B.4, B.6): a long system prompt, the
shared span, a private prompt, then every earlier agent's output behind some glue. Layout ``L0`` is
the shared span with next to nothing around it, which shows a method's own cost.

What an agent says about itself (system prompt, private prompt, glue, tail) is the same in every
workflow of a trace, as it is for real agents; shared spans and outputs are drawn anew each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvcmas.engine.segments import Prompt, Segment, pf, ph
from kvcmas.engine.workflow import QUERY, Node, Workflow, fully_connected, loop
from kvcmas.errors import UserError
from traces.schema import Trace, TraceTurn, TraceWorkflow, write_trace

# Goes up when the same settings would no longer give the same ids.
GENERATOR_VERSION: Final = 1

LayoutName = Literal["T", "L0"]
Source = Literal["system", "private", "shared", "output"]


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt's parts, in prompt order, and of a turn's output.

    ``glue`` stands before each earlier output; it is 0 where prompts hold no outputs.
    """

    system: int
    shared: int
    private: int
    glue: int
    tail: int
    output: int

    def scaled(self, scale: float) -> Lengths:
        """Every length divided by ``scale`` and rounded; what was there stays at least 1."""
        return Lengths(**{part: _scaled(n, scale) for part, n in asdict(self).items()})


# Agent-specific tokens: (system, private, glue, tail).
_AGENT_TOKENS: Mapping[str, tuple[int, int, int, int]] = {
    "T": (1024, 512, 16, 5),
    "L0": (64, 16, 0, 0),
}


@dataclass(frozen=True)
class Seeds:
    """One seed per source of randomness: change one and the other ids stay as they were.

    ``private`` also draws glue and tail.
    """

    system: int = 0
    private: int = 0
    shared: int = 0
    output: int = 0

    @classmethod
    def all(cls, seed: int) -> Seeds:
        """The same seed everywhere; the sources are independent nevertheless."""
        return cls(seed, seed, seed, seed)


@dataclass(frozen=True)
class GeneratorSettings:
    """Everything a generated trace depends on.

    A trace of fewer workflows is the beginning of one of more.

    Attributes:
        vocab: ids are drawn from ``range(vocab)``, without those of ``exclude`` (special tokens).
        layout: see the module.
        shared: tokens of the shared span, before scaling.
        output: tokens that each agent generates, before scaling.
        workflows: user requests; 17 of 4 turns are the 68 requests of the authors' public harness.
        agents: turns of a round.
        scale: divides every length.
        rounds: in layout ``T`` every later turn reads the outputs of the round before as well.

    Raises:
        UserError: a value out of range, or no id left to draw.
    """

    vocab: int
    layout: LayoutName = "T"
    shared: int = 2048
    output: int = 128
    workflows: int = 17
    agents: int = 4
    scale: float = 1.0
    seeds: Seeds = field(default_factory=Seeds)
    exclude: frozenset[int] = frozenset()
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.layout not in _AGENT_TOKENS:
            known = ", ".join(get_args(LayoutName))
            raise UserError(f"unknown layout {self.layout!r}; known: {known}")
        for name in ("vocab", "shared", "output", "workflows", "agents", "rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.scale < float("inf"):
            raise UserError(f"scale={self.scale} must be positive")
        if min(asdict(self.seeds).values()) < 0:
            raise UserError("seeds must not be negative")
        if not self.allowed.size:
            raise UserError(f"none of the {self.vocab} ids is left to draw from")

    @property
    def allowed(self) -> npt.NDArray[np.int64]:
        """Ids that may be drawn, ascending, ``[n]``."""
        excluded = np.fromiter(self.exclude, np.int64, len(self.exclude))
        return np.setdiff1d(np.arange(self.vocab, dtype=np.int64), excluded)

    @property
    def lengths(self) -> Lengths:
        """Tokens of every part, scaled."""
        system, private, glue, tail = _AGENT_TOKENS[self.layout]
        whole = Lengths(system, self.shared, private, glue, tail, self.output)
        return whole.scaled(self.scale)

    @property
    def graph(self) -> Workflow:
        """Fully connected for ``T``, in a loop if there are rounds; ``L0``: all read the query."""
        if self.layout == "T":
            return (
                fully_connected(self.agents) if self.rounds == 1 else loop(self.agents, self.rounds)
            )
        nodes = (Node(a, r) for r in range(1, self.rounds + 1) for a in range(self.agents))
        return Workflow("shared_query", tuple(nodes))

    @property
    def positions(self) -> int:
        """Tokens of the longest turn, its output included: the context a model needs."""
        n = self.lengths
        outputs = max(len(node.parents) for node in self.graph.nodes) * (n.glue + n.output)
        return n.system + n.shared + n.private + outputs + n.tail + n.output

    @property
    def origin(self) -> dict[str, Any]:
        """The settings as JSON, for the trace's header."""
        origin = {
            "generator_version": GENERATOR_VERSION,
            **asdict(self),
            "exclude": sorted(self.exclude),
            "lengths": asdict(self.lengths),
        }
        if self.rounds == 1:  # traces of one round are named as before there were more
            del origin["rounds"]
        return origin


def generate(settings: GeneratorSettings) -> tuple[TraceWorkflow, ...]:
    """Draw all workflows."""
    ids = _Ids(settings)
    return tuple(_workflow(settings, ids, index) for index in range(settings.workflows))


def write_generated(path: Path, settings: GeneratorSettings) -> Trace:
    """Draw a trace and write it.

    Raises:
        UserError: the file cannot be written.
    """
    return write_trace(
        path,
        generate(settings),
        kind="generated",
        topology=settings.graph.name,
        vocab=settings.vocab,
        origin=settings.origin,
    )


class _Ids:
    """Seeded ids. What a segment holds depends on its key alone, not on what was drawn before."""

    def __init__(self, settings: GeneratorSettings) -> None:
        self._allowed = settings.allowed
        self._seeds = asdict(settings.seeds)

    def draw(self, source: Source, tokens: int, *key: int) -> tuple[int, ...]:
        # numpy promises the raw stream of a bit generator, not what its distributions make of it,
        # and the same settings have to give the same file in years to come. The bias of the modulo
        # is below 2^-40.
        stream = (get_args(Source).index(source), *key)
        sequence = np.random.SeedSequence(self._seeds[source], spawn_key=stream)
        raw = np.random.PCG64(sequence).random_raw(tokens)
        return tuple(self._allowed[raw % self._allowed.size].tolist())


def _workflow(settings: GeneratorSettings, ids: _Ids, index: int) -> TraceWorkflow:
    lengths, nodes = settings.lengths, settings.graph.nodes
    query = ph(QUERY, ids.draw("shared", lengths.shared, index))
    outputs: dict[str, Segment] = {}
    turns = []
    for node in nodes:
        earlier = [outputs[parent] for parent in node.parents]
        prompt = Prompt(tuple(_segments(lengths, ids, node.agent, query, earlier)))
        later = () if node.round == 1 else (node.round,)
        output = ph(node.out_slot, ids.draw("output", lengths.output, index, node.agent, *later))
        outputs[node.name] = output
        turns.append(TraceTurn.of(node, prompt, output.ids))
    # Named after what differs between traces: an anchor pool tells requests apart by their names.
    request = f"{settings.layout}-{lengths.shared}-{settings.seeds.shared}-{index:04d}"
    return TraceWorkflow(request=request, turns=tuple(turns))


def _segments(
    lengths: Lengths, ids: _Ids, agent: int, query: Segment, earlier: list[Segment]
) -> list[Segment]:
    def private(tokens: int, part: int, position: int = 0) -> Segment:
        return pf(ids.draw("private", tokens, agent, part, position))

    segments = [pf(ids.draw("system", lengths.system, agent)), query, private(lengths.private, 0)]
    for position, output in enumerate(earlier):
        segments += [private(lengths.glue, 1, position), output]
    segments.append(private(lengths.tail, 2))
    return [segment for segment in segments if len(segment)]


def _scaled(tokens: int, scale: float) -> int:
    return max(1, int(tokens / scale + 0.5)) if tokens else 0
