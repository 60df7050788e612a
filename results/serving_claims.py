"""Claims about serving under load: C01 to C08 and C37, judged under even arrivals on real cells.

Everything is a ratio of TTFT percentiles over the same requests, beside the ratio of the work
bounds. Which machine and which scale stand behind it is said with every verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from results import verdicts
from results.claims import Claim, PaperValue, Verdict
from results.comparable import split_settings
from results.memory_claims import calculated
from results.names import display_name
from results.records import Run
from results.serving import EXACT, ServedCell, in_comparison, of_mode, ratio, served_cells
from results.verdicts import Evaluation, Measured, evaluates

LAW = "even"
_RHO = 0.8
_PAPER_MODEL = "llama-3.1-8b"
# FullShared is a reference, not one of the sharing methods that the paper ranks (C06).
_NOT_RANKED = (EXACT, "fullshared", "kvcmas")


@evaluates("C01", "C02", "C03", "C04", "C05")
def _headline(claim: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """KVCMAS and its rival at the serving point; of two first turns the corrected one is judged."""
    pairs = headline_pairs(claim.id, _setting(runs))
    return _ratios(claim, pairs[0], pairs[1:]) if pairs else None


def headline_pairs(claim: str, cells: Sequence[ServedCell]) -> list[tuple[ServedCell, ServedCell]]:
    """What C01 to C05 compare: numerator and denominator, the pair that is judged first.

    Empty without the cells for it; rivals that correct a context-free reference come with a
    corrected first turn, then with a dense one.
    """
    at = _point(cells, *((2048, 2048) if claim == "C05" else (32_768, 128)))
    own = _cell(at, "kvcmas")
    if own is None:
        return []
    if claim in ("C01", "C02", "C05"):
        dense = _cell(at, EXACT)
        return [] if dense is None else [(dense, own)]
    wanted: dict[str, object] = {"chained": False} if claim == "C04" else {}
    name = "kvcmas" if claim == "C04" else "graphflow"
    rivals = [_cell(at, name, **wanted, first_turn=turn) for turn in ("corrected", "dense")]
    if rivals[0] is None:
        return []
    return [(own, rival) for rival in {id(r): r for r in rivals if r is not None}.values()]


@evaluates("C06")
def _lowest_median(claim: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """KVCMAS below every other sharing method at every load, and more so at the far end."""
    cells = [cell for cell in _setting(runs) if cell.serve.output_tokens == 128]
    sizes = sorted({cell.serve.shared_tokens for cell in cells})
    rates = sorted({cell.serve.qps for cell in cells})
    if len(sizes) < 2 or len(rates) < 2:
        return None
    ranked = _ranked(claim, cells)
    near = _gain(cells, sizes[0], rates[0])
    far = _gain(cells, sizes[-1], rates[-1])
    if ranked is None or near is None or far is None:
        return None
    grows: Verdict = "agrees" if far.value > near.value else "disagrees"
    return Evaluation(
        verdicts.worst((ranked.verdict, grows)),
        (*ranked.measured, near, far),
        ranked.runs,
        ranked.setting,
    )


@evaluates("C37")
def _lowest_with_outputs(claim: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """The same for 2K and short to middling outputs at high rates."""
    cells = [
        cell
        for cell in _setting(runs)
        if cell.serve.shared_tokens == 2048
        and cell.serve.output_tokens in (128, 512)
        and cell.serve.qps >= 4
    ]
    if {cell.serve.output_tokens for cell in cells} != {128, 512}:
        return None
    return _ranked(claim, cells)


@evaluates("C07")
def _little_difference(claim: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """Slowest over fastest method, at 2K and the lowest rate against 32K and the highest."""
    cells = [cell for cell in _setting(runs) if cell.serve.output_tokens == 128]
    spreads = []
    for shared, choose in ((2048, min), (32_768, max)):
        own = [cell for cell in cells if cell.serve.shared_tokens == shared]
        rates = {cell.serve.qps for cell in own}
        if len(rates) < 2:
            return None
        at = [cell for cell in own if cell.serve.qps == choose(rates) and cell.requests]
        at = _least_scaled(in_comparison(at, _RHO))
        at = [cell for cell in at if cell.key.method != "fullshared"]
        if len(at) < 2:
            return None
        slow = max(at, key=lambda cell: cell.ttft(50).value)
        fast = min(at, key=lambda cell: cell.ttft(50).value)
        spreads.append(
            (
                Measured(
                    f"p50 {_name(slow)}/{_name(fast)} at {shared // 1024}K,"
                    f" {at[0].serve.qps:g} QPS",
                    *ratio(slow, fast, 50),
                ),
                (slow, fast),
            )
        )
    (near, near_cells), (far, far_cells) = spreads
    used = (*near_cells, *far_cells)
    verdict: Verdict = "agrees" if near.high < far.low else "disagrees"
    return Evaluation(verdict, (near, far), _keys(used), _where(used))


@evaluates("C08")
def _out_of_memory(claim: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """KVComm's need on the paper's model at 8K, 32K and 6K generated, against 80 GB.

    What served cells were refused for; without such cells, one workflow's need by formula.
    """
    needs = []
    cells = [
        cell
        for cell in served_cells(of_mode(runs))
        if cell.key.method == "kvcomm"
        and cell.runs[0].info.model == _PAPER_MODEL
        and cell.serve.scale == 1
    ]
    used = []
    for shared, output in ((8192, 128), (32_768, 128), (2048, 2048)):
        found = [
            cell
            for cell in cells
            if (cell.serve.shared_tokens, cell.serve.output_tokens) == (shared, output)
        ]
        if not found:
            return calculated(claim, runs)
        used.append(found[0])
        gigabytes = found[0].serve.memory_needed_bytes / 1e9
        needs.append(Measured(f"GB at {shared} shared and {output} output tokens", gigabytes))
    above = all(need.value > 80 for need in needs)
    return Evaluation(
        "agrees" if above else "disagrees",
        tuple(needs),
        _keys(used),
        f"{_PAPER_MODEL}: weights, live caches and full pools by formula",
    )


def _ratios(
    claim: Claim,
    pair: tuple[ServedCell, ServedCell],
    others: Sequence[tuple[ServedCell, ServedCell]],
) -> Evaluation | None:
    """The claim's percentiles of ``pair``, which is judged, and of ``others`` beside it."""
    judged: list[Verdict] = []
    measured = []
    for value in claim.paper_values:
        if value.value is None:
            return None
        q = percentile_of(value)
        own = compared(*pair, q)
        if math.isnan(own.value):
            return None
        judged.append(verdicts.judge_ratio(own.value, value.value))
        measured += [own, *(compared(*other, q) for other in others)]
    used = [*pair, *(cell for other in others for cell in other)]
    return Evaluation(verdicts.worst(judged), tuple(measured), _keys(used), _where(used))


def percentile_of(value: PaperValue) -> float:
    """Which percentile a number of the paper is about."""
    return 90 if value.quantity.startswith("p90") else 50


def compared(upper: ServedCell, lower: ServedCell, q: float) -> Measured:
    """Ratio of two cells' percentiles, with the ratio of their work bounds."""
    own, other = upper.serve.work_bound, lower.serve.work_bound
    return Measured(
        f"p{q:g} {_name(upper)}/{_name(lower)}",
        *ratio(upper, lower, q),
        bound=None if own is None or other is None else other / own,
    )


def _ranked(claim: Claim, cells: Sequence[ServedCell]) -> Evaluation | None:
    """Whether KVCMAS's median is below that of every other ranked method under every load.

    The rival that comes nearest is reported, with its load.
    """
    found: list[Measured] = []
    used: list[ServedCell] = []
    loads, clear = 0, True
    for load, rho in dict.fromkeys((cell.key.load, cell.key.rho) for cell in cells):
        at = [cell for cell in cells if (cell.key.load, cell.key.rho) == (load, rho)]
        own = _cell(at, "kvcmas")
        rivals = [c for c in at if c.key.method not in _NOT_RANKED and c.requests]
        if own is None or not own.requests or not rivals:
            continue
        loads += 1
        where = f"{load.bench}, {load.qps:g} QPS, rho {rho:g}"
        for rival in rivals:
            estimate = ratio(rival, own, 50)
            clear &= estimate.low > 1
            found.append(Measured(f"p50 {_name(rival)}/{_name(own)} ({where})", *estimate))
        used += [own, *rivals]
    if not found:
        return None
    nearest = min(found, key=lambda one: one.value)
    setting = f"nearest of {len(found)} comparisons under {loads} loads; {_where(used)}"
    return Evaluation("agrees" if clear else "disagrees", (nearest,), _keys(used), setting)


def _gain(cells: Sequence[ServedCell], shared: int, qps: float) -> Measured | None:
    """NonShared over KVCMAS at one load."""
    at = [
        cell
        for cell in cells
        if (cell.serve.shared_tokens, cell.serve.qps) == (shared, qps)
        and cell.key.rho in (_RHO, 0.0)
    ]
    dense, own = _cell(at, EXACT), _cell(at, "kvcmas")
    if dense is None or own is None:
        return None
    gain = compared(dense, own, 50)
    return Measured(
        f"{gain.quantity} at {shared // 1024}K, {qps:g} QPS",
        gain.value,
        gain.low,
        gain.high,
        gain.bound,
    )


def _setting(runs: Sequence[Run]) -> list[ServedCell]:
    """Cells under even arrivals of the one setting with the most runs; vLLM goes first."""
    groups = [group for _, group in split_settings(of_mode(runs))]
    if not groups:
        return []
    best = max(groups, key=lambda group: (group[0].info.engine == "vllm", len(group)))
    return [cell for cell in served_cells(best) if cell.serve.arrival == LAW]


def _point(cells: Sequence[ServedCell], shared: int, output: int) -> list[ServedCell]:
    """Those of one context at 8 QPS and rho 0.8, at the smallest scale there is."""
    cells = [
        cell
        for cell in in_comparison(cells, _RHO)
        if (cell.serve.shared_tokens, cell.serve.output_tokens) == (shared, output)
        and cell.serve.qps == 8
    ]
    return _least_scaled(cells)


def _least_scaled(cells: Sequence[ServedCell]) -> list[ServedCell]:
    """Those at the smallest scale: the same context at another one is another trace."""
    scale = min((cell.serve.scale for cell in cells), default=1.0)
    return [cell for cell in cells if cell.serve.scale == scale]


def _cell(cells: Iterable[ServedCell], method: str, **settings: object) -> ServedCell | None:
    """The first answered cell of a method with these settings; KVCMAS is chained by default.

    What a cell says nothing about fits: emulated methods have next to no settings.
    """
    wanted = {"chained": True, **settings} if method == "kvcmas" else settings

    def fits(cell: ServedCell) -> bool:
        own = cell.runs[0].info.settings
        return all(own.get(key, value) == value for key, value in wanted.items())

    return next((c for c in cells if c.key.method == method and c.requests and fits(c)), None)


def _name(cell: ServedCell) -> str:
    return f"{display_name(cell.key.method)} {cell.key.label}".strip()


def _keys(cells: Iterable[ServedCell]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run.info.run_key for cell in cells for run in cell.runs))


def _where(cells: Sequence[ServedCell]) -> str:
    """What was served on what."""

    def texts(value: Callable[[ServedCell], object]) -> str:
        return ", ".join(sorted({str(value(cell)) for cell in cells}))

    info = cells[0].runs[0].info
    return (
        f"{info.model}, {info.engine}, {info.hardware}; lengths divided by"
        f" {texts(lambda cell: f'{cell.serve.scale:g}')}; layout"
        f" {texts(lambda cell: cell.serve.layout)}; n = {texts(lambda cell: len(cell.requests))}"
    )
