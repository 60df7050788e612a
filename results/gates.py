"""What a gate's threshold holds: the reuse along a run's requests, and under other thresholds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from results.records import Run
from results.schema import TurnRecord

# Methods whose corrections pass a gate, and the setting that holds its threshold.
THRESHOLDS = {"kvcmas": "tau", "kvcomm": "gamma"}
QUARTERS = 4


def by_quarter(runs: Sequence[Run]) -> list[list[TurnRecord]]:
    """The turns of the first, second, ... quarter of the requests, in their order."""
    quarters: list[list[TurnRecord]] = [[] for _ in range(QUARTERS)]
    for run in runs:
        for turn in run.turns:
            quarters[QUARTERS * turn.sample_index // len(run.samples)].append(turn)
    return quarters


def held_by(turns: Iterable[TurnRecord]) -> list[tuple[float, float]]:
    """Rho (entry) by threshold, if the entropies had been the recorded ones under any threshold.

    A step function: ascending thresholds, each with the rho from it on; the first is 0, below all
    entropies. Edges that no gate judged count as they were served; a refused correction counts as
    one of the whole segment. Empty where nothing could be reused.
    """
    edges = [edge for turn in turns for edge in turn.edges if edge.tokens and not edge.first]
    shared = sum(edge.shared_entries for edge in edges)
    steps = Counter({0.0: 0})
    for edge in edges:
        executed = edge.executed_entries if edge.action == "correct" else 0
        if edge.entropy is not None:
            steps[edge.entropy] += edge.shared_entries - executed
        else:
            steps[0.0] += edge.shared_entries - edge.executed_entries
    if not shared:
        return []
    thresholds = sorted(steps)
    held = accumulate(steps[threshold] for threshold in thresholds)
    return [
        (threshold, entries / shared) for threshold, entries in zip(thresholds, held, strict=True)
    ]
