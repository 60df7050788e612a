"""From a turn's result to the fields that every kind of record has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from kvcmas.engine.session import Engine, TurnResult
from results.records import EdgeRecord, EntryCounts


def edge_records(result: TurnResult) -> Iterator[EdgeRecord]:
    """One record per non-empty PH of the turn."""
    for decision in result.decisions:
        entries = result.accounting.shared[decision.segment]
        yield EdgeRecord(
            slot=result.prompt.slot(decision.segment),
            source=result.holders.get(decision.segment),
            target=result.node,
            tokens=len(result.prompt.segments[decision.segment]),
            action=decision.action,
            reason=decision.reason,
            entropy=decision.entropy,
            shared_entries=entries.total,
            executed_entries=entries.executed,
            first=decision.segment in result.first_seen,
        )


def measured(result: TurnResult, engine: Engine) -> dict[str, Any]:
    """Identity of the prompt, where its entries came from, and bytes held after the turn."""
    accounting, state = result.accounting, engine.method.state()
    return {
        "prompt_sha256": result.prompt.sha256,
        "prompt_tokens": len(result.prompt),
        "layers": accounting.layers,
        "entries": EntryCounts(**asdict(accounting.prompt)),
        "touched_rows": accounting.touched_rows,
        "executed_flops": accounting.flops,
        "reference_tokens": accounting.reference_tokens,
        "source_bytes": result.source_bytes,
        "pool_bytes": state.nbytes,
        "pool_entries": len(state.entries),
        "reference_bytes": result.reference_bytes,
    }
