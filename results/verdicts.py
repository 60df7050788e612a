"""From records to verdicts: one evaluator per claim, the rules that judge numbers, the ledger.

A module that can judge a claim decorates a function from all runs to an :class:`Evaluation` with
:func:`evaluates`. Without the records that it needs the function returns None, and the claim stays
"not measured".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from results.claims import Claim, LedgerRow, Verdict, load_ledger
from results.errors import ClaimError
from results.records import Run


@dataclass(frozen=True)
class Measured:
    """One number behind a verdict, with its interval and what it could be at most."""

    quantity: str
    value: float
    low: float = math.nan
    high: float = math.nan
    bound: float | None = None

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]"
        bound = "" if self.bound is None else f", work bound {self.bound:.2f}"
        return f"{self.quantity}: {self.value:.2f}{interval}{bound}"


@dataclass(frozen=True)
class Evaluation:
    """A verdict, the numbers and the keys of the runs behind it, and the setting of those."""

    verdict: Verdict
    measured: tuple[Measured, ...]
    runs: tuple[str, ...]
    setting: str


Evaluate = Callable[[Claim, Sequence[Run]], Evaluation | None]

_EVALUATORS: dict[str, Evaluate] = {}  # filled while the package is imported, never after
# From best to worst: several numbers of one claim are as good as the worst of them.
_RANK: tuple[Verdict, ...] = ("agrees", "agrees in direction", "disagrees")


def evaluates(*ids: str) -> Callable[[Evaluate], Evaluate]:
    """Declare a function as the way these claims are judged.

    Raises ClaimError if one of them is judged already.
    """

    def add(evaluate: Evaluate) -> Evaluate:
        for id_ in ids:
            if id_ in _EVALUATORS:
                raise ClaimError(f"{id_} is evaluated twice")
            _EVALUATORS[id_] = evaluate
        return evaluate

    return add


def judged(runs: Sequence[Run]) -> list[LedgerRow]:
    """The whole ledger, every claim with the verdict that these runs give it."""
    rows = []
    for claim in sorted(load_ledger().claims, key=lambda claim: claim.id):
        evaluate = _EVALUATORS.get(claim.id)
        found = evaluate(claim, runs) if evaluate is not None else None
        if found is None:
            rows.append(LedgerRow(claim))
        else:
            texts = (*map(str, found.measured), found.setting)
            rows.append(LedgerRow(claim, found.verdict, found.runs, texts))
    return rows


def judge_ratio(value: float, paper: float) -> Verdict:
    """Within the tolerance of the paper's ratio, or at least on its side of 1."""
    tolerance = load_ledger().rules["ratio"].tolerance or 0.0
    if abs(value - paper) <= tolerance * paper:
        return "agrees"
    return "agrees in direction" if (value - 1) * (paper - 1) > 0 else "disagrees"


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The worst of several verdicts."""
    return max(verdicts, key=_RANK.index)
