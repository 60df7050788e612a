"""A loaded model on one of the engines, from which cells get a serving engine each."""

from __future__ import annotations

from typing import Protocol

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.contract import Method, State
from repro.runners.serving.clock import Clock
from repro.runners.serving.engine import ServingEngine
from repro.runners.serving.hf import HFEngine


class Backend(Protocol):
    """What a study needs of a model.

    Attributes:
        adapter: the model under Transformers, where pools are filled for either engine.
        engine_name: as run records have it.
        attention: backend of attention, for the record.
        reference_prefix: ids before context-free references.
    """

    adapter: TransformersAdapter
    engine_name: str
    attention: str
    reference_prefix: tuple[int, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the engine holds."""
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

    def __init__(
        self, adapter: TransformersAdapter, weight_bytes: int, reference_prefix: tuple[int, ...]
    ) -> None:
        self.adapter = adapter
        self.weight_bytes = weight_bytes
        self.reference_prefix = reference_prefix

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
            reference_prefix=self.reference_prefix,
            pool=pool,
            decode=decode,
        )

    def close(self) -> None:
        """See :class:`Backend`."""
