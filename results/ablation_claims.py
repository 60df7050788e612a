"""Claims about ranks and pool size, C28 and C29: cost from single streams, quality beside it.

Quality is the first-token KL on recorded GSM8K where it was measured, and MMLU letters where those
were; without either there is no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from results.claims import Claim, Measured, Verdict
from results.records import Run
from results.stream import StreamCell, ratio, stream_cells
from results.stream_claims import FLAT, setting
from results.stream_quality import Quality, quality, variant_of
from results.stream_studies import capacity, pools
from results.verdicts import Evaluation, evaluates

# A later step is marginal if it brings at most this share of the first one's gain.
MARGINAL: Final = 0.25
_KL: Final = "kl_first_nats"


@evaluates("C28")
def _ranks(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """Divergence from rank 16 to 32 and from 32 to all; TTFT, throughput and memory beside it."""
    by_rank: dict[tuple[str, ...], dict[object, StreamCell]] = {}
    for cell in stream_cells(run for run in runs if run.info.kind == "stream"):
        base, delta = (cell.run.info.settings.get(n) for n in ("rank_base", "rank_delta"))
        own = cell.method == "kvcmas" and cell.differs_in <= {"rank_base", "rank_delta", "rho"}
        if own and base == delta and cell.turns:
            by_rank.setdefault((*cell.shape, cell.run.info.model), {})[base] = cell
    cells: dict[object, StreamCell] = max(by_rank.values(), key=len, default={})
    if not {16, 32, None} <= set(cells):
        return None
    steps = [cells[rank] for rank in (16, 32, None)]
    judged = _gains(runs, steps, "rank 16 to 32", "32 to all")
    if judged is None:
        return None
    found, measured, helps = judged
    ttft = _spread(steps, lambda cell: cell.ttft().value)
    speed = _spread(steps, lambda cell: cell.throughput().value)
    held = [_pool(cell) for cell in steps]
    measured += [
        Measured("largest / least TTFT over ranks", ttft),
        Measured("largest / least throughput over ranks", speed),
        Measured("pool of all ranks / of rank 16", held[-1] / held[0]),
    ]
    holds = helps and max(ttft, speed) <= FLAT and held == sorted(held)
    return _evaluation(holds, measured, steps, found)


@evaluates("C29")
def _pool_size(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """Divergence from V=2 to 10 and from 10 to 20; TTFT from V=5 on."""
    cells = {capacity(cell): cell for cell in pools(runs) if cell.method == "kvcmas" and cell.turns}
    if not {2, 5, 10, 20} <= set(cells):
        return None
    steps = [cells[size] for size in (2, 10, 20)]
    judged = _gains(runs, steps, "V=2 to 10", "10 to 20")
    if judged is None:
        return None
    found, measured, helps = judged
    late = ratio(cells[20], cells[5])
    measured.append(Measured("TTFT at V=20 / at V=5", *late))
    return _evaluation(helps and late.value <= FLAT, measured, [*steps, cells[5]], found)


def _gains(
    runs: Sequence[Run], steps: Sequence[StreamCell], first: str, second: str
) -> tuple[Quality, list[Measured], bool] | None:
    """How much divergence each of two steps removes; whether the second one is marginal."""
    found = quality(runs, map(variant_of, steps))
    kl = [found.rows.get(variant_of(cell), {}).get(_KL) for cell in steps]
    known = [value for value in kl if value is not None]
    if len(known) < len(steps):
        return None
    early, late = known[0] - known[1], known[1] - known[2]
    measured = [
        Measured(f"KL removed, {first}, nats", early),
        Measured(f"KL removed, {second}, nats", late),
    ]
    return found, measured, early > 0 and late <= MARGINAL * early


def _spread(cells: Sequence[StreamCell], value: Callable[[StreamCell], float]) -> float:
    values = [value(cell) for cell in cells]
    return max(values) / min(values)


def _pool(cell: StreamCell) -> int:
    return max(row.memory.pool_base + row.memory.pool_delta for row in cell.turns.values())


def _evaluation(
    holds: bool, measured: Sequence[Measured], cells: Sequence[StreamCell], found: Quality
) -> Evaluation:
    verdict: Verdict = "agrees" if holds else "disagrees"
    keys = (*(c.run.info.run_key for c in cells), *(r.info.run_key for r in found.runs))
    where = "; ".join((setting(cells), *found.notes))
    return Evaluation(verdict, tuple(measured), keys, where)
