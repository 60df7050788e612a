"""A model on one of the engines, from which every cell gets a serving engine of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from kvcmas.engine.adapter import ModelSpec, TransformersAdapter
from kvcmas.engine.contract import Method, State
from repro.models import ResolvedModel, load
from repro.models.loading import DType, quiet_transformers
from repro.models.vocabulary import Vocabulary, read_vocabulary
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import ServingEngine
from repro.runners.serving.hf import HFEngine


@dataclass(frozen=True)
class Sketch:
    """What can be known of a model without its weights."""

    spec: ModelSpec
    weight_bytes: int
    vocabulary: Vocabulary

    @property
    def reference_prefix(self) -> tuple[int, ...]:
        """Ids before a segment in its context-free reference prefill."""
        start = self.vocabulary.start
        return () if start is None else (start,)

    @classmethod
    def of(cls, model: ResolvedModel, dtype: DType) -> Sketch:
        """Read configuration and tokenizer.

        Raises:
            UserError: an architecture that is not supported.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(model.path)
            stored = config.dtype or torch.float32
            chosen = stored if dtype == "auto" else getattr(torch, dtype)
            empty = AutoModelForCausalLM.from_config(config, dtype=chosen)
        return cls(
            spec=TransformersAdapter(empty).spec,
            weight_bytes=sum(parameter.nbytes for parameter in empty.parameters()),
            vocabulary=read_vocabulary(model.path),
        )


class Backend(Protocol):
    """What a study needs of a model.

    Attributes:
        engine_name: as run records have it.
        attention: backend of attention, for the record.
    """

    sketch: Sketch
    engine_name: str
    attention: str
    device: str

    @property
    def adapter(self) -> TransformersAdapter:
        """The model under Transformers, where pools are filled for either engine."""
        ...

    def engine(
        self,
        method: Method,
        clock: Clock,
        *,
        topology: str,
        pool: State | None = None,
        decode: bool = False,
    ) -> ServingEngine:
        """An engine that has served nothing and starts from ``pool``."""
        ...

    def close(self) -> None:
        """Give the model back."""
        ...


class HFBackend:
    """The Transformers engine, one request at a time."""

    engine_name = "transformers"
    attention = "sdpa"

    def __init__(self, model: ResolvedModel, sketch: Sketch, dtype: DType, device: str) -> None:
        self.sketch = sketch
        self.device = device
        self._model = model
        self._dtype: DType = dtype

    @cached_property
    def adapter(self) -> TransformersAdapter:
        """See :class:`Backend`."""
        model, _ = load(self._model, dtype=self._dtype, device=self.device)
        return TransformersAdapter(model)

    def engine(
        self,
        method: Method,
        clock: Clock,
        *,
        topology: str,
        pool: State | None = None,
        decode: bool = False,
    ) -> ServingEngine:
        """See :class:`Backend`."""
        return HFEngine(
            self.adapter,
            method,
            clock,
            topology=topology,
            reference_prefix=self.sketch.reference_prefix,
            pool=pool,
            decode=decode,
        )

    def close(self) -> None:
        """See :class:`Backend`."""
