"""Claims about a single stream: C26, C27, C30, C31 and C32, from runs of kind ``stream``.

Of several models and scales that ran a context, the one nearest to the paper's decides: its model
first, then the least scaling. What was measured elsewhere says so in the setting, because weights
of a small model are little beside pools, and short prompts little beside fixed costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from results import stats
from results.claims import Claim, Measured, PaperSettings, Verdict, load_ledger
from results.names import display_name
from results.records import Run
from results.stream import BOOTSTRAP_SEED, StreamCell, ratio, stream_cells, usual
from results.verdicts import Evaluation, evaluates

PAPER_MODEL: Final = "llama-3.1-8b"
SELECTIVE: Final = ("droidspeak", "cacheblend", "relaycaching")
DELTA: Final = ("graphflow", "kvcomm")
# The paper gives no number for these words.
COMPARABLE: Final = 1.5
FLAT: Final = 1.15
# Numbers of agents and of rounds that the paper compares.
SIZES: Final = (2, 4, 8)

Group = list[StreamCell]


@evaluates("C26")
def _memory_over_rho(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """KVCMAS's bytes over the selective methods', and its own from one ratio to the other."""
    measured, used = [], []
    holds = True
    for group in _contexts(runs):
        own = [c for c in _plain(group, "kvcmas") if c.held_bytes]
        others = [c for c in group if c.method in SELECTIVE and c.held_bytes]
        if len({c.info.rho for c in own}) < 2 or not others:
            continue
        held = [c.held_bytes or 0 for c in own]
        most = max(c.held_bytes or 0 for c in others)
        beside, spread = max(held) / most, max(held) / min(held)
        where = _where(group)
        measured += [
            Measured(f"KVCMAS / most of the selective methods, {where}", beside),
            Measured(f"most / least over rho, {where}", spread),
        ]
        holds &= beside <= COMPARABLE and spread <= FLAT
        used += [*own, *others]
    return _evaluation(holds, measured, used, f"comparable: at most {COMPARABLE:g} times")


@evaluates("C27")
def _fastest(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """TTFT and throughput against every sharing method, at both pairs of ratios."""
    measured, used = [], []
    contexts, holds = set(), True
    for group in _contexts(runs):
        context = group[0].info.shared_tokens // 1024
        for own, rivals in _matched(group):
            contexts.add(context)
            used += [own, *rivals]
            if context > 2:
                found = [m for rival in rivals for m in (_slower(rival, own), _behind(rival, own))]
                nearest = min(found, key=lambda one: one.low)
                measured.append(nearest)
                holds &= all(one.low > 1 for one in found)
            else:
                fastest = min(rivals, key=lambda rival: rival.ttft().value)
                measured.append(_slower(own, fastest))
                holds &= measured[-1].value <= FLAT
    if not {8, 32} <= contexts:
        return None
    return _evaluation(holds, measured, used, "nearest rival of each context and ratio")


@evaluates("C30")
def _over_agents(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """TTFT at every N, throughput from four agents on, growth of memory."""
    return _scaling(runs, "agents", least_for_throughput=4)


@evaluates("C31")
def _over_rounds(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """TTFT and throughput at every R, growth of memory."""
    return _scaling(runs, "rounds", least_for_throughput=2)


@evaluates("C32")
def _compute(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """FLOPs of selective methods over KVCMAS's at the same rho, correction counted."""
    measured, used = [], []
    holds = True
    for group in _contexts(runs):
        for own in _plain(group, "kvcmas"):
            others = [c for c in group if c.method in SELECTIVE and c.info.rho == own.info.rho]
            if not (others and own.later):
                continue
            found = [
                Measured(
                    f"FLOPs {display_name(c.method)}/KVCMAS at rho {own.info.rho:g},"
                    f" {_where(group)}",
                    *_flops_ratio(c, own),
                )
                for c in others
            ]
            measured.append(min(found, key=lambda one: one.value))
            holds &= all(one.value > 1 for one in found)
            used += [own, *others]
    return _evaluation(holds, measured, used, "model execution, gate, weights and correction")


def _scaling(runs: Sequence[Run], number: str, *, least_for_throughput: int) -> Evaluation | None:
    def shape(cell: StreamCell) -> tuple[object, ...]:
        return cell.run.info.model, cell.info.shared_tokens, cell.info.scale

    cells = [c for c in _usual(runs) if (c.info.agents == 3 or number == "agents")]
    cells = [c for c in cells if (c.info.rounds == 1 or number == "rounds")]
    swept = {
        value: {shape(c) for c in cells if getattr(c.info, number) == value} for value in SIZES
    }
    # A shape that is nearer to the paper's but was run once only says nothing here.
    cells = [c for c in cells if all(shape(c) in shapes for shapes in swept.values())]
    measured, used = [], []
    holds, values = True, {}
    for group in _nearest(cells, shape):
        by_number: dict[int, Group] = {}
        for cell in group:
            by_number.setdefault(getattr(cell.info, number), []).append(cell)
        for value in SIZES:
            for own, rivals in _matched(by_number[value]):
                found = [_slower(rival, own, all_turns=True) for rival in rivals]
                if value >= least_for_throughput:
                    found += [_behind(rival, own) for rival in rivals]
                measured.append(min(found, key=lambda one: one.low))
                holds &= all(one.low > 1 for one in found)
                values[value] = own.held_bytes or 0
                used += [own, *rivals]
        if {SIZES[0], SIZES[-1]} <= set(values):
            growth = values[SIZES[-1]] / values[SIZES[0]]
            measured.append(Measured(f"memory of KVCMAS, 8 over 2 {number}", growth))
            holds &= growth <= FLAT
    return _evaluation(holds, measured, used, f"memory grows little: at most {FLAT:g} times")


def _matched(group: Sequence[StreamCell]) -> Iterable[tuple[StreamCell, Group]]:
    """KVCMAS at each ratio with its rivals, selective methods at the ratio that goes with it."""
    paper = load_ledger().paper
    for own in _plain(group, "kvcmas"):
        if not own.turns or own.info.rho is None:
            continue
        partner = _partner(paper, own.info.rho)
        rivals = [
            cell
            for cell in group
            if cell.turns
            and (
                (cell.method in SELECTIVE and cell.info.rho == partner)
                or (cell.method in DELTA and cell.info.rho == own.info.rho)
            )
        ]
        if rivals:
            yield own, rivals


def _partner(paper: PaperSettings, rho: float) -> float | None:
    pairs = zip(paper.delta_rho, paper.selective_rho, strict=True)
    return next((selective for delta, selective in pairs if delta == rho), None)


def _plain(group: Sequence[StreamCell], method: str) -> Group:
    return [c for c in group if c.method == method and c.differs_in <= {"rho"}]


def _usual(runs: Sequence[Run]) -> Group:
    return usual(stream_cells(run for run in runs if run.info.kind == "stream"))


def _contexts(runs: Sequence[Run]) -> list[Group]:
    """Per context the cells with three agents and one round that are nearest to the paper's."""
    cells = [c for c in _usual(runs) if (c.info.agents, c.info.rounds) == (3, 1)]
    return _nearest(cells, lambda cell: (cell.run.info.model, cell.shape))


def _nearest(cells: Sequence[StreamCell], same: Callable[[StreamCell], object]) -> list[Group]:
    """Per context the group of equal ``same`` that is nearest to the paper's, the shortest first.

    Groups without KVCMAS beside another sharing method tell nothing.
    """
    groups: dict[tuple[int, object], Group] = {}
    for cell in cells:
        groups.setdefault(
            (cell.info.shared_tokens, (cell.run.info.hardware, same(cell))), []
        ).append(cell)
    best: dict[int, Group] = {}
    for (context, _), group in groups.items():
        methods = {cell.method for cell in group if cell.turns}
        if "kvcmas" not in methods or not methods & {*SELECTIVE, *DELTA}:
            continue
        if context not in best or _distance(group) < _distance(best[context]):
            best[context] = group
    return [best[context] for context in sorted(best)]


def _distance(group: Group) -> tuple[bool, float, int]:
    first = group[0]
    return not _of_paper(first), first.info.scale, -len(group)


def _of_paper(cell: StreamCell) -> bool:
    return cell.run.info.model.split(" ")[0] == PAPER_MODEL


def _slower(rival: StreamCell, own: StreamCell, *, all_turns: bool = False) -> Measured:
    return Measured(
        f"TTFT {_name(rival)}/{_name(own)} {_where([own])}",
        *ratio(rival, own, all_turns=all_turns),
        bound=_bound(own, rival),
    )


def _behind(rival: StreamCell, own: StreamCell) -> Measured:
    """Throughput of ``own`` over the rival's: the ratio of their times on the same tokens."""
    common = [key for key in own.turns if key in rival.turns]
    sums: dict[str, list[float]] = {}
    for key in common:
        pair = sums.setdefault(key[0], [0.0, 0.0])
        pair[0] += rival.turns[key].e2e_s
        pair[1] += own.turns[key].e2e_s
    estimate = stats.ratio_of_sums(
        [pair[0] for pair in sums.values()],
        [pair[1] for pair in sums.values()],
        seed=BOOTSTRAP_SEED,
    )
    return Measured(f"throughput {_name(own)}/{_name(rival)} {_where([own])}", *estimate)


def _flops_ratio(rival: StreamCell, own: StreamCell) -> stats.Estimate:
    keys = [key for key in own.later if key in rival.later]
    flops = [
        [sum(work.flops for work in cell.later[key].work) for key in keys] for cell in (rival, own)
    ]
    return stats.ratio_of_sums(*flops, seed=BOOTSTRAP_SEED)


def _bound(own: StreamCell, rival: StreamCell) -> float | None:
    mine, other = own.info.work_bound, rival.info.work_bound
    return None if mine is None or other is None else mine / other


def _name(cell: StreamCell) -> str:
    return f"{display_name(cell.method)} {cell.label}".strip()


def _where(group: Sequence[StreamCell]) -> str:
    info = group[0].info
    extra = f", N={info.agents}" if info.agents != 3 else ""
    extra += f", R={info.rounds}" if info.rounds > 1 else ""
    return f"at {info.shared_tokens // 1024}K{extra}"


def _evaluation(
    holds: bool, measured: Sequence[Measured], used: Sequence[StreamCell], how: str
) -> Evaluation | None:
    if not measured:
        return None
    verdict: Verdict = "agrees" if holds else "disagrees"
    keys = tuple(dict.fromkeys(cell.run.info.run_key for cell in used))
    return Evaluation(verdict, tuple(measured), keys, f"{how}; {setting(used)}")


def setting(cells: Sequence[StreamCell]) -> str:
    """What ran where, and how far from the paper's shape that is."""
    parts = []
    for cell in cells:
        info, run = cell.info, cell.run.info
        weights = next((row.memory.weights for row in cell.turns.values()), None)
        size = "" if weights is None else f", {weights / 1e9:.2f} GB of weights"
        parts.append(
            f"{run.model} ({run.dtype}{size}) at {info.shared_tokens // 1024}K"
            f" / {info.scale:g} on {run.hardware}"
        )
    far = [cell for cell in cells if not _of_paper(cell) or cell.info.scale != 1]
    note = f"; far from the paper's shape ({PAPER_MODEL}, lengths / 1)" if far else ""
    return "; ".join(dict.fromkeys(parts)) + note
