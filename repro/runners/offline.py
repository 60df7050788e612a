"""What offline phases share: requests that are not evaluated, and where results are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro.models.cache import cache_dir
from repro.runners.replay import replay, warm_up
from results.records import run_key
from traces.schema import TraceWorkflow


@dataclass(frozen=True)
class Requests:
    """Recorded workflows on one model.

    Attributes:
        warm: workflows that fill pools, with every correction refused.
        held_out: workflows on which something is found out; they are never evaluated.
        identity: what results depend on beside the workflows (model revision, dtype).
    """

    adapter: TransformersAdapter
    topology: str
    warm: tuple[TraceWorkflow, ...]
    held_out: tuple[TraceWorkflow, ...]
    reference_prefix: tuple[int, ...]
    identity: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.held_out:
            raise UserError("calibration needs requests of its own; give --calibration")

    def first(self, count: int) -> Requests:
        """The same with the first ``count`` held-out workflows only."""
        return replace(self, held_out=self.held_out[:count])

    def engine(self, method: str, settings: Mapping[str, Any]) -> Engine:
        """A fresh engine of a method."""
        return Engine(
            self.adapter, make_method(method, settings), reference_prefix=self.reference_prefix
        )

    def warmed(self, method: str, settings: Mapping[str, Any]) -> Engine:
        """An engine whose method has learned from the warm-up workflows."""
        engine = self.engine(method, settings)
        if engine.method.learns:
            warm_up(engine, self.warm, self.topology)
        return engine

    def replay(self, engine: Engine, *, keep_buffers: bool = False) -> Iterator[TurnResult]:
        """Every turn of the held-out workflows."""
        for workflow in self.held_out:
            yield from replay(engine, workflow, self.topology, keep_buffers=keep_buffers)

    def path(self, kind: str, method: str, **depends: Any) -> Path:
        """Where a result of this ``kind`` that also ``depends`` on these is kept."""
        workflows = {
            name: [w.model_dump(mode="json") for w in getattr(self, name)]
            for name in ("warm", "held_out")
        }
        key = run_key({**self.identity, **workflows, "method": method, **depends})
        return cache_dir() / kind / f"{method.replace(':', '.')}-{key}.json"


def store(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in one step; others may write the same at the same time.

    Raises:
        UserError: it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=2))
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise UserError(f"cannot write {path}: {error.strerror}") from error
