"""From what a turn did to the fields that every kind of record has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from kvcmas.engine.accounting import Accounting
from kvcmas.engine.contract import Decision, State
from kvcmas.engine.segments import Prompt
from kvcmas.engine.session import Engine, TurnResult
from results.records import EdgeRecord, EntryCounts


class Outcome(Protocol):
    """What both engines say about a turn that is over."""

    @property
    def node(self) -> str:
        """Name of the turn."""
        ...

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What happened to every PH."""
        ...

    @property
    def accounting(self) -> Accounting:
        """What was executed."""
        ...

    @property
    def first_seen(self) -> frozenset[int]:
        """PH that nobody had held before."""
        ...

    @property
    def holders(self) -> Mapping[int, str]:
        """Who held the others last."""
        ...

    @property
    def source_bytes(self) -> int:
        """Source caches of the workflow."""
        ...

    @property
    def reference_bytes(self) -> int:
        """Its context-free references."""
        ...


def edge_records(result: TurnResult) -> Iterator[EdgeRecord]:
    """One record per non-empty PH of the turn."""
    return edges_of(result.prompt, result)


def edges_of(prompt: Prompt, outcome: Outcome) -> Iterator[EdgeRecord]:
    """The same for a turn of either engine."""
    for decision in outcome.decisions:
        entries = outcome.accounting.shared[decision.segment]
        yield EdgeRecord(
            slot=prompt.slot(decision.segment),
            source=outcome.holders.get(decision.segment),
            target=outcome.node,
            tokens=len(prompt.segments[decision.segment]),
            action=decision.action,
            reason=decision.reason,
            entropy=decision.entropy,
            shared_entries=entries.total,
            executed_entries=entries.executed,
            first=decision.segment in outcome.first_seen,
        )


def measured(result: TurnResult, engine: Engine) -> dict[str, Any]:
    """Identity of the prompt, where its entries came from, and bytes held after the turn."""
    return measured_of(result.prompt, result, engine.method.state())


def measured_of(prompt: Prompt, outcome: Outcome, pool: State) -> dict[str, Any]:
    """The same for a turn of either engine; ``pool`` is what its method has learned."""
    accounting = outcome.accounting
    return {
        "prompt_sha256": prompt.sha256,
        "prompt_tokens": len(prompt),
        "layers": accounting.layers,
        "entries": EntryCounts(**asdict(accounting.prompt)),
        "touched_rows": accounting.touched_rows,
        "executed_flops": accounting.flops,
        "reference_tokens": accounting.reference_tokens,
        "source_bytes": outcome.source_bytes,
        "pool_bytes": pool.nbytes,
        "pool_entries": len(pool.entries),
        "reference_bytes": outcome.reference_bytes,
    }
