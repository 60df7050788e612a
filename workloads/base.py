"""What a workload brings: samples, agents' words, observations, scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from kvcmas.engine.workflow import Node, Workflow

# package: the benchmark's own file, taken from a pinned wheel of the Python package index.
DataSource = Literal["hub", "local", "package", "procedural"]


@dataclass(frozen=True)
class Sample:
    """One user request: ``question`` fills slot ``q``; ``answer`` (gold) never enters a prompt."""

    id: str
    question: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> str:
        """What is asked, whoever asks: two samples of one request must not be in two splits."""
        return self.question


@dataclass(frozen=True)
class Dataset:
    """Samples with their provenance; ``sha256`` covers the samples in file order.

    ``missing`` names what had to be left out because its image or clip is not there.
    """

    samples: tuple[Sample, ...]
    source: DataSource
    label: str
    sha256: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Role:
    """An agent: display name, system prompt, and the instruction that closes its user message.

    ``reply`` is what its replies are made to begin with.
    """

    name: str
    system: str
    instruction: str
    reply: str = ""


@dataclass(frozen=True)
class Text:
    """Agent-specific text (becomes a PF segment)."""

    text: str


@dataclass(frozen=True)
class Slot:
    """A place for the shared segment of that name (becomes a PH segment)."""

    name: str


@dataclass(frozen=True)
class Message:
    """One agent turn as a chat: system text, then user pieces in order (paper Eq. 1).

    ``reply`` is how the agent's reply begins; the model goes on from there.
    """

    system: str
    user: tuple[Text | Slot, ...]
    reply: str = ""


@dataclass(frozen=True)
class Score:
    """Outcome of one sample. ``failure`` says why no answer was read; then it is not correct.

    ``notes`` are kept with the sample: JSON-able, the same in every repetition.
    """

    correct: bool
    extracted: str | None
    expected: str
    failure: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


class Workload(Protocol):
    """The contract between a benchmark and the harness."""

    @property
    def name(self) -> str:
        """The registry's name of the workload."""
        ...

    @property
    def agents(self) -> tuple[str, ...]:
        """Display names of its agents, in the order of their numbers."""
        ...

    @property
    def workflow(self) -> Workflow:
        """The graph of its agents' turns."""
        ...

    def load(self, data: str | Path, *, split: str, seed: int) -> Dataset:
        """Samples from ``hub``, ``procedural`` or a directory; UserError on bad or missing data."""
        ...

    def message(self, node: Node, filled: Sequence[str]) -> Message:
        """The words of ``node``; ``filled`` names the slots that hold text now, in prompt order."""
        ...

    def observe(self, node: Node, output: str, sample: Sample) -> str | None:
        """Task observation made from an agent's output (slot ``obs{k}``), or None.

        Nothing of ``sample.answer`` may show in it.
        """
        ...

    def score(self, sample: Sample, final_output: str) -> Score:
        """Score the last agent's text."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A workload whose answer is one of a few texts, which the harness ranks by likelihood."""

    @property
    def choices(self) -> tuple[str, ...]:
        """What the last agent could reply, e.g. four letters."""
        ...

    def choose(self, sample: Sample, final_output: str, likelihoods: Sequence[float]) -> Score:
        """Score with the log-likelihood (nats) of each choice as the last agent's reply."""
        ...
