"""Verdicts on claims about caches and deltas."""

from __future__ import annotations

import pytest

from results.analysis import Analysis
from results.verdicts import judged
from tests.analyses import chain, coverage, ranks

SELECTED = {"layer": 0.3, "deviation": 0.25, "attention": 0.3}


def verdict(id_: str, *analyses: Analysis) -> str:
    return next(row.verdict for row in judged((), analyses) if row.claim.id == id_)


@pytest.mark.parametrize(
    ("base", "delta", "expected"),
    [(24, 20, "agrees"), (20, 24, "disagrees"), (40, 33, "disagrees")],
)
def test_deltas_below_32_and_bases_above_them(base: int, delta: int, expected: str) -> None:
    assert verdict("C14", ranks({"base": base, "delta": delta})) == expected


def test_one_reading_of_pf_deltas_is_enough() -> None:
    assert verdict("C15", ranks({"pf_presence": 5})) == "agrees"
    assert verdict("C15", ranks({"pf_presence": 5}, energy=0.8)) == "disagrees"
    assert verdict("C15", ranks({"pf_presence": 9})) == "disagrees"


def test_chaining_needs_the_lower_error_and_an_exact_first_agent() -> None:
    assert verdict("C16", chain(0.1, 0.3)) == "agrees"
    assert verdict("C16", chain(0.3, 0.1)) == "disagrees"
    assert verdict("C16", chain(0.1, 0.3, first=0.05)) == "disagrees"


def test_every_model_has_to_bear_a_claim_out() -> None:
    other = chain(0.3, 0.1, model="another@1")
    assert verdict("C16", chain(0.1, 0.3), other) == "disagrees"
    row = next(r for r in judged((), [chain(0.1, 0.3), other]) if r.claim.id == "C16")
    assert len(row.runs) == 2 and "another on gsm8k" in row.setting


def test_what_selections_leave_and_whether_random_does_as_well() -> None:
    found = coverage(SELECTED)
    assert verdict("C17", found) == verdict("C36", found) == "agrees"
    assert verdict("C17", coverage(SELECTED | {"layer": 0.6})) == "disagrees"
    assert verdict("C36", coverage(SELECTED | {"deviation": 0.15})) == "disagrees"


def test_models_without_training_say_nothing() -> None:
    assert verdict("C16", chain(0.1, 0.3, model="tiny-llama@1")) == "not measured"
