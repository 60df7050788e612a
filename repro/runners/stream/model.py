"""The model of a single stream: real weights, or random ones of a published shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from kvcmas.engine.adapter import TransformersAdapter
from repro.models import load, resolve
from repro.models.dummy import load_dummy, text_configuration
from repro.models.loading import DType
from repro.models.published import figures
from repro.models.vocabulary import Vocabulary
from repro.profiles.stream import StreamShape
from repro.runners.serving.backend import Sketch

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StreamModel:
    """What is known of a model before it is opened, and how to open it.

    Attributes:
        revision: of the weights; None for random ones.
    """

    name: str
    revision: str | None
    dummy: bool
    sketch: Sketch
    _open: Callable[[], PreTrainedModel]

    def open(self) -> TransformersAdapter:
        """Read or make the weights."""
        return TransformersAdapter(self._open())


def stretch(adapter: TransformersAdapter, positions: int) -> None:
    """Allow contexts of ``positions`` tokens, be they longer than the model's own.

    Ids are random, so answers mean nothing anyway; what a layer costs does not depend on whether
    the model was trained that far.
    """
    longest = max(positions, adapter.spec.max_positions)
    adapter.spec = replace(adapter.spec, max_positions=longest)


def stream_model(shape: StreamShape, dtype: DType, device: str, console: Console) -> StreamModel:
    """The model of a shape; its weights are not read yet.

    Raises:
        UserError: an unknown model, or an architecture that is not supported.
    """
    if shape.load == "dummy":
        found = figures(text_configuration(shape.model).name, dtype)
        vocabulary = Vocabulary(found.spec.vocab, frozenset(), None, found.spec.max_positions)
        sketch = Sketch(found.spec, found.weight_bytes, vocabulary)
        return StreamModel(
            f"{found.name} (random weights)",
            None,
            True,
            sketch,
            lambda: load_dummy(shape.model, dtype=dtype, device=device),
        )
    resolved = resolve(shape.model, console=console)
    return StreamModel(
        resolved.name,
        resolved.revision,
        False,
        Sketch.of(resolved, dtype),
        lambda: load(resolved, dtype=dtype, device=device)[0],
    )
