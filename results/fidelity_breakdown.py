"""Where the error sits: the fidelity runs taken apart by edge and by layer (long tables)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pandas as pd

from results import stats
from results.fidelity_table import COMMAND
from results.records import Run
from results.replay import CELL_COLUMNS, Replay, accepted, replays
from results.schema import FidelityEdge
from results.tables import Column, register

EDGE_COLUMNS = (
    *CELL_COLUMNS,
    Column("source", "Source", "string"),
    Column("target", "Target", "string"),
    Column("slot", "Slot", "string"),
    Column("n", "n", "Int64"),
    Column("accept_rate", "Accepted", digits=3),
    Column("k_error", "K error", digits=4),
    Column("v_error", "V error", digits=4),
    Column("tokens", "Tokens", digits=1),
)

LAYER_COLUMNS = (
    *CELL_COLUMNS,
    Column("layer", "Layer", "Int64"),
    Column("n", "n", "Int64"),
    Column("k_error", "K error", digits=4),
    Column("v_error", "V error", digits=4),
    Column("n_accepted", "n accepted", "Int64"),
    Column("k_error_accepted", "K error accepted", digits=4),
    Column("v_error_accepted", "V error accepted", digits=4),
)


@register(
    "fidelity-edges",
    title="Fidelity by edge: K and V error, mean over layers",
    columns=EDGE_COLUMNS,
    kinds=("fidelity",),
    command=COMMAND,
)
def by_edge(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per cell, source, target and slot, in the order of the workflow.

    Edges without a source are here too: a method that corrects the first consumer of a segment
    leaves an error there, which every later edge of a chain inherits.
    """
    rows = [
        {**replay.names(), "source": source, "target": target, "slot": slot, **_edge_row(edges)}
        for replay in replays(runs)
        for (source, target, slot), edges in _edges(replay).items()
    ]
    return pd.DataFrame(rows, columns=[column.name for column in EDGE_COLUMNS])


@register(
    "fidelity-layers",
    title="Fidelity by layer: K and V error of the edges that had something to reuse",
    columns=LAYER_COLUMNS,
    kinds=("fidelity",),
    command=COMMAND,
)
def by_layer(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per cell and layer."""
    rows = []
    for replay in replays(runs):
        edges = [edge for _, edge in replay.edges]
        taken = [edge for edge in edges if accepted(edge)]
        layers = max((turn.layers for turn in replay.turns), default=0)
        rows += [
            {
                **replay.names(),
                "layer": layer,
                "n": len(edges),
                "k_error": stats.mean([edge.k_error[layer] for edge in edges]),
                "v_error": stats.mean([edge.v_error[layer] for edge in edges]),
                "n_accepted": len(taken),
                "k_error_accepted": stats.mean([edge.k_error[layer] for edge in taken]),
                "v_error_accepted": stats.mean([edge.v_error[layer] for edge in taken]),
            }
            for layer in range(layers)
        ]
    return pd.DataFrame(rows, columns=[column.name for column in LAYER_COLUMNS])


def _edges(replay: Replay) -> dict[tuple[str | None, str, str], list[FidelityEdge]]:
    """Non-empty edges of the evaluated turns by (source, target, slot)."""
    edges: dict[tuple[str | None, str, str], list[FidelityEdge]] = defaultdict(list)
    for turn in sorted(replay.turns, key=lambda turn: turn.turn_index):
        for edge in turn.edges:
            if edge.tokens:
                edges[edge.source, edge.target, edge.slot].append(edge)
    return edges


def _edge_row(edges: Sequence[FidelityEdge]) -> dict[str, object]:
    return {
        "n": len(edges),
        "accept_rate": stats.mean([float(accepted(edge)) for edge in edges]),
        "k_error": stats.mean([stats.mean(edge.k_error) for edge in edges]),
        "v_error": stats.mean([stats.mean(edge.v_error) for edge in edges]),
        "tokens": stats.mean([edge.tokens for edge in edges]),
    }
