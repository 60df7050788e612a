"""What a workload brings: samples, agents' words, observations, scoring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kvcmas.engine.workflow import Node, Workflow

DataSource = Literal["hub", "local", "procedural"]


@dataclass(frozen=True)
class Sample:
    """One user request: ``question`` fills slot ``q``; ``answer`` (gold) never enters a prompt."""

    id: str
    question: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dataset:
    """Samples with their provenance; ``sha256`` covers the samples in file order."""

    samples: tuple[Sample, ...]
    source: DataSource
    label: str
    sha256: str


@dataclass(frozen=True)
class Role:
    """An agent: display name, system prompt, and the instruction that closes its user message."""

    name: str
    system: str
    instruction: str


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
    """One agent turn as a chat: system text, then user pieces in order (paper Eq. 1)."""

    system: str
    user: tuple[Text | Slot, ...]


@dataclass(frozen=True)
class Score:
    """Outcome of one sample. ``failure`` says why no answer was read; then it is not correct."""

    correct: bool
    extracted: str | None
    expected: str
    failure: str | None = None


class Workload(Protocol):
    """The contract between a benchmark and the harness."""

    @property
    def name(self) -> str:
        """The registry's name of the workload."""
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

    def observe(self, node: Node, output: str) -> str | None:
        """Task observation made from an agent's output (slot ``obs{k}``), or None."""
        ...

    def score(self, sample: Sample, final_output: str) -> Score:
        """Score the last agent's text."""
        ...
