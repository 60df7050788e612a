"""From records to verdicts: one evaluator per claim, the rules that judge numbers, the ledger.

A module that can judge a claim decorates a function from all runs to an :class:`Evaluation` with
:func:`evaluates`, or one from all analyses with :func:`evaluates_analyses`. Without the records
that it needs the function returns None, and the claim stays "not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from results.analysis import Analysis
from results.claims import Claim, LedgerRow, Measured, Verdict, load_ledger
from results.errors import ClaimError
from results.records import Run

__all__ = [
    "Evaluation",
    "Measured",
    "evaluates",
    "evaluates_analyses",
    "judge_ratio",
    "judge_value",
    "judged",
    "worst",
]


@dataclass(frozen=True)
class Evaluation:
    """A verdict, the numbers and the keys of the runs behind it, and the setting of those."""

    verdict: Verdict
    measured: tuple[Measured, ...]
    runs: tuple[str, ...]
    setting: str


Evaluate = Callable[[Claim, Sequence[Run]], Evaluation | None]
EvaluateAnalyses = Callable[[Claim, Sequence[Analysis]], Evaluation | None]

# Filled while the package is imported, never after.
_EVALUATORS: dict[str, Evaluate] = {}
_OF_ANALYSES: dict[str, EvaluateAnalyses] = {}
# From best to worst: several numbers of one claim are as good as the worst of them.
_RANK: tuple[Verdict, ...] = ("agrees", "agrees in direction", "disagrees")


def evaluates(*ids: str) -> Callable[[Evaluate], Evaluate]:
    """Declare a function as the way these claims are judged.

    Raises ClaimError if one of them is judged already.
    """

    def add(evaluate: Evaluate) -> Evaluate:
        _declare(_EVALUATORS, ids, evaluate)
        return evaluate

    return add


def evaluates_analyses(*ids: str) -> Callable[[EvaluateAnalyses], EvaluateAnalyses]:
    """The same for a function from all analyses."""

    def add(evaluate: EvaluateAnalyses) -> EvaluateAnalyses:
        _declare(_OF_ANALYSES, ids, evaluate)
        return evaluate

    return add


def judged(runs: Sequence[Run], analyses: Sequence[Analysis] = ()) -> list[LedgerRow]:
    """The whole ledger, every claim with the verdict that these records give it."""
    rows = []
    for claim in sorted(load_ledger().claims, key=lambda claim: claim.id):
        found = None
        if claim.id in _EVALUATORS:
            found = _EVALUATORS[claim.id](claim, runs)
        elif claim.id in _OF_ANALYSES:
            found = _OF_ANALYSES[claim.id](claim, analyses)
        if found is None:
            rows.append(LedgerRow(claim))
        else:
            rows.append(LedgerRow(claim, found.verdict, found.runs, found.measured, found.setting))
    return rows


T = TypeVar("T")


def _declare(evaluators: dict[str, T], ids: Sequence[str], evaluate: T) -> None:
    for id_ in ids:
        if id_ in _EVALUATORS or id_ in _OF_ANALYSES:
            raise ClaimError(f"{id_} is evaluated twice")
        evaluators[id_] = evaluate


def judge_ratio(value: float, paper: float) -> Verdict:
    """Within the tolerance of the paper's ratio, or at least on its side of 1."""
    tolerance = load_ledger().rules["ratio"].tolerance or 0.0
    if abs(value - paper) <= tolerance * paper:
        return "agrees"
    return "agrees in direction" if (value - 1) * (paper - 1) > 0 else "disagrees"


def judge_value(claim: Claim, relation: str, value: float, paper: float) -> Verdict:
    """A number beside the paper's, by the rule for the claim's kind, a ratio or an amount."""
    if claim.kind == "ratio":
        return judge_ratio(value, paper)
    if relation == "above":
        return "agrees" if value > paper else "disagrees"
    tolerance = load_ledger().rules["bytes"].tolerance or 0.0
    return "agrees" if abs(value - paper) <= tolerance * paper else "disagrees"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several verdicts."""
    return max(verdicts, key=_RANK.index)
