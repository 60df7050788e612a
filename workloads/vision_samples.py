"""Samples that ask about an image or a clip: making, listing and scoring them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcmas.errors import UserError
from workloads.base import Dataset, DataSource, Sample, Score
from workloads.data import dataset
from workloads.vision_media import Media
from workloads.vision_questions import Question

_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class VisualSample(Sample):
    """A sample whose picture is part of slot ``q``, before the text of the question."""

    media: Media
    asked: Question = field(repr=False)

    @property
    def request(self) -> str:
        """The same words about another picture are another request."""
        return f"{self.media.fingerprint()} {self.question}"

    @classmethod
    def of(
        cls, name: str, media: Media, asked: Question, meta: Mapping[str, Any] | None = None
    ) -> VisualSample:
        """The sample ``name``, with what else is known about it."""
        return cls(name, asked.prompt, asked.answer, dict(meta or {}), media=media, asked=asked)


def visual_dataset(samples: Sequence[VisualSample], source: DataSource, label: str) -> Dataset:
    """Those of ``samples`` whose picture is there, with their provenance; the others are listed.

    The hash covers texts and pictures of the samples that remain, not where pictures lie.

    Raises:
        UserError: no picture is there.
    """
    there = [sample for sample in samples if sample.media.exists()]
    missing = [f"{s.id} ({s.media.name})" for s in samples if not s.media.exists()]
    if not there:
        raise UserError(
            f"{label}: not one of its {len(samples)} questions has its "
            f"{samples[0].media.kind}, for instance {some(missing)}"
        )
    plain = [
        Sample(s.id, s.question, s.answer, {**s.meta, "media": s.media.fingerprint()})
        for s in there
    ]
    made = dataset(plain, source, label)
    return replace(made, samples=tuple(there), missing=tuple(missing))


def score_visual(sample: Sample, output: str, scorer: str) -> Score:
    """Score by the rules for the question's kind of answer; ``scorer`` names their version."""
    if not isinstance(sample, VisualSample):
        raise TypeError(f"sample {sample.id} asks about no picture")
    return replace(sample.asked.score(output), notes={"scorer": scorer})


def some(names: Sequence[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
