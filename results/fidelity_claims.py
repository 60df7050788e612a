"""Claims about accuracy as fidelity orders: C19, C22, C24 and C33, from replays on identical ids.

Fidelity is the KL of the first-token distribution to NonShared's on reuse turns. It stands for
accuracy on models and sample sizes whose accuracy cannot tell methods apart, so a claim in points
agrees in direction at best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from results import stats
from results.claims import Claim, Verdict
from results.comparable import split_settings
from results.names import RANDOM_WEIGHTS, display_name
from results.records import Run
from results.replay import Replay, TurnKey, replays, reusable
from results.stats import Estimate
from results.verdicts import Evaluation, Measured, evaluates

_SEED: Final = 0
_RHO: Final = "rho=0.8"
# EPIC is not among the paper's methods.
_RIVALS: Final = (
    *("fullshared", "droidspeak", "cacheblend", "relaycaching", "graphflow", "kvcomm"),
)
_NON_CHAINED: Final = f"chained=False {_RHO}"
_LEAST_TAUS: Final = 3


@evaluates("C19")
def _best_sharing(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """KVCMAS's divergence below every other sharing method's, on every benchmark measured."""
    measured, used = [], []
    for group in _benches(runs):
        own = _find(group, "kvcmas", _RHO)
        rivals = [r for r in group if r.cell.method in _RIVALS and _at_a_ratio(r)]
        if own is None or not rivals:
            continue
        measured += [_more(rival, own) for rival in rivals]
        used += [own, *rivals]
    if not measured:
        return None
    holds = all(one.low > 0 for one in measured)
    nearest = min(measured, key=lambda one: one.value)
    return _evaluation("agrees in direction" if holds else "disagrees", (nearest,), used)


@evaluates("C22")
def _chaining(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """Non-chained minus chained divergence at the same reuse ratio."""
    measured, used = [], []
    for group in _benches(runs):
        chained, other = _find(group, "kvcmas", _RHO), _find(group, "kvcmas", _NON_CHAINED)
        if chained is None or other is None:
            continue
        measured.append(_more(other, chained))
        used += [chained, other]
    if not measured:
        return None
    holds = all(one.low > 0 for one in measured)
    return _evaluation("agrees in direction" if holds else "disagrees", measured, used)


@evaluates("C24")
def _threshold(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """From the lowest to the highest tau reuse and divergence rise, and neither turns back."""
    measured, used = [], []
    holds = True
    for group in _benches(runs):
        swept = sorted((r for r in group if _tau(r) is not None), key=lambda r: _tau(r) or 0.0)
        if len(swept) < _LEAST_TAUS:
            continue
        first, last = swept[0], swept[-1]
        for name, values in (("rho", _reuse), ("KL", _divergence)):
            change = _paired(values(last), values(first))
            span = f"tau {_tau(first):g} to {_tau(last):g}, {_on(first)}"
            measured.append(Measured(f"change of {name}, {span}", *change))
            holds &= change.low > 0
            steps = [_paired(values(b), values(a)) for a, b in pairwise(swept)]
            holds &= not any(step.high < 0 for step in steps)
        used += swept
    return _evaluation("agrees" if holds else "disagrees", measured, used) if measured else None


@evaluates("C33")
def _recovered(_: Claim, runs: Sequence[Run]) -> Evaluation | None:
    """FullShared and GraphFlow diverge; KVComm diverges less than either."""
    measured, used = [], []
    holds = True
    for group in _benches(runs):
        shared, graph = _find(group, "fullshared", ""), _find(group, "graphflow", _RHO)
        comm = _find(group, "kvcomm", _RHO)
        if shared is None or graph is None or comm is None:
            continue
        for one in (shared, graph):
            kl = _mean(_divergence(one))
            less = _more(one, comm)
            measured += [less, Measured(f"KL of {_name(one)}, {_on(one)}", *kl)]
            holds &= kl.low > 0 and less.low > 0
        used += [shared, graph, comm]
    return _evaluation("agrees" if holds else "disagrees", measured, used) if measured else None


def _benches(runs: Iterable[Run]) -> list[list[Replay]]:
    """Replays of trained models, one list per setting and benchmark, longest runs first."""
    chosen = [
        run for run in runs if run.info.kind == "fidelity" and run.info.model not in RANDOM_WEIGHTS
    ]
    groups: list[list[Replay]] = []
    for _, same in split_settings(chosen):
        found = sorted(replays(same), key=lambda replay: -replay.cell.n)
        for bench in dict.fromkeys(replay.cell.bench for replay in found):
            groups.append([replay for replay in found if replay.cell.bench == bench])
    return groups


def _find(group: Iterable[Replay], method: str, label: str) -> Replay | None:
    """The longest replay of a method's variant."""
    return next((r for r in group if (r.cell.method, r.cell.label) == (method, label)), None)


def _at_a_ratio(replay: Replay) -> bool:
    return replay.cell.method == "fullshared" or "rho=" in replay.cell.label


def _tau(replay: Replay) -> float | None:
    """The threshold of a KVCMAS run that differs from the defaults in nothing else."""
    name, equals, value = replay.cell.label.partition("=")
    swept = replay.cell.method == "kvcmas" and name == "tau" and " " not in value
    return float(value) if swept and equals else None


def _divergence(replay: Replay) -> dict[TurnKey, float]:
    """First-token KL (nats) of each reuse turn, a mean over repetitions."""
    return _by_turn(
        ((t.sample_id, t.turn_index), t.answer_kl[0]) for t in replay.reuse_turns if t.answer_kl
    )


def _reuse(replay: Replay) -> dict[TurnKey, float]:
    """Share of reusable entries that each reuse turn did not execute."""
    return _by_turn(
        (
            (turn.sample_id, turn.turn_index),
            1
            - sum(edge.executed_entries for edge in reusable(turn))
            / sum(edge.shared_entries for edge in reusable(turn)),
        )
        for turn in replay.reuse_turns
    )


def _by_turn(values: Iterable[tuple[TurnKey, float]]) -> dict[TurnKey, float]:
    found: dict[TurnKey, list[float]] = {}
    for key, value in values:
        found.setdefault(key, []).append(value)
    return {key: stats.mean(repeated) for key, repeated in found.items()}


def _more(other: Replay, own: Replay) -> Measured:
    """The other's divergence minus one's own, over the turns that both replayed."""
    difference = _paired(_divergence(other), _divergence(own))
    return Measured(f"KL of {_name(other)} - {_name(own)}, {_on(own)}", *difference)


def _paired(a: dict[TurnKey, float], b: dict[TurnKey, float]) -> Estimate:
    common = [key for key in a if key in b]
    return _mean({key: a[key] - b[key] for key in common})


def _mean(values: dict[TurnKey, float]) -> Estimate:
    samples = [sample for sample, _ in values]
    return stats.cluster_bootstrap(list(values.values()), samples, seed=_SEED)


def _name(replay: Replay) -> str:
    return f"{display_name(replay.cell.method)} {replay.cell.label}".strip()


def _on(replay: Replay) -> str:
    return f"{replay.runs[0].info.model} on {replay.cell.bench}"


def _evaluation(
    verdict: Verdict, measured: Sequence[Measured], used: Sequence[Replay]
) -> Evaluation:
    infos = [run.info for replay in used for run in replay.runs]
    where = dict.fromkeys(
        f"{info.bench} ({info.data}), {info.model}, {info.engine}, {info.hardware}"
        for info in infos
    )
    turns = sorted({len(replay.reuse_turns) for replay in used})
    return Evaluation(
        verdict,
        tuple(measured),
        tuple(dict.fromkeys(info.run_key for info in infos)),
        f"{len(used)} replays, {', '.join(map(str, turns))} reuse turns; {'; '.join(where)}",
    )
