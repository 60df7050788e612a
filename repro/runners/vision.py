"""From a sample's image or clip to the rows that stand for it in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoConfig, PreTrainedModel

from kvcmas.engine.vision import Picture, VisualEncoder, most_rows
from kvcmas.errors import UserError
from repro.models import ResolvedModel, load_image_processor
from workloads.base import Sample
from workloads.vision_samples import VisualSample


@dataclass(frozen=True)
class Eyes:
    """Looks at samples with a vision-language model's own tower; words have no picture."""

    encoder: VisualEncoder

    @classmethod
    def of(cls, model: PreTrainedModel, resolved: ResolvedModel) -> Eyes:
        """The eyes of a loaded model.

        Raises:
            UserError: it has none.
        """
        return cls(VisualEncoder(model, load_image_processor(resolved)))

    def __call__(self, sample: Sample) -> Picture | None:
        """The picture of ``sample``, or None if it has none.

        Raises:
            UserError: it cannot be read, or is of no use; it is named.
        """
        if not isinstance(sample, VisualSample):
            return None
        media = sample.media
        frames = media.frames()
        try:
            return (
                self.encoder.image(*frames) if media.kind == "image" else self.encoder.video(frames)
            )
        except ValueError as error:
            raise UserError(f"cannot use {media.kind} {media.name}: {error}") from error


def has_pictures(samples: Sequence[Sample]) -> bool:
    """Whether any of ``samples`` asks about a picture."""
    return any(isinstance(sample, VisualSample) for sample in samples)


def picture_rows(samples: Sequence[Sample], model: ResolvedModel) -> int:
    """Rows that a picture of ``samples`` takes in a prompt at most; 0 where they are words."""
    counts = [
        None if sample.media.kind == "image" else sample.media.count
        for sample in samples
        if isinstance(sample, VisualSample)
    ]
    if not counts:
        return 0
    load_image_processor(model)  # says so if the model has no use for pictures
    config = AutoConfig.from_pretrained(model.path)
    return max(most_rows(config, count) for count in set(counts))


def check_pictures(samples: Sequence[Sample]) -> None:
    """Open every picture once, before a long run begins.

    Raises:
        UserError: one cannot be opened; it is named.
    """
    for sample in samples:
        if isinstance(sample, VisualSample):
            sample.media.check()
