import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.answers import NO_NUMBER, gold_number, last_number, plain, score_number

# What models write, what a reader takes from it.
GOLDEN = [
    ("The answer is 18.", "18"),
    ("The answer is 18", "18"),
    ("So she makes $18 every day.", "18"),
    ("She has 9 * $2 = $18.00 left.", "18"),
    ("Total: $1,234.50", "1234.5"),
    ("That is 70,000 dollars, or \\$70,000", "70000"),
    ("1,000,000.", "1000000"),
    ("\\boxed{42}", "42"),
    ("$\\boxed{1{,}234}$", "1234"),
    ("$12\\,500$", "12500"),
    ("The answer is 12\u202f500.", "12500"),
    ("**72**", "72"),
    ("#### -1,200", "-1200"),
    ("16-3-4 = 9", "9"),
    ("16 - 3", "3"),
    ("10-20", "20"),
    ("10\u201320", "20"),
    ("The change is -5 degrees", "-5"),
    ("= -5", "-5"),
    ("(-3)", "-3"),
    ("\u22127", "-7"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("50%", "50"),
    ("50 %", "50"),
    ("5.00", "5"),
    ("0.50 liters", "0.5"),
    ("x=.5", "0.5"),
    ("3/4", "0.75"),
    ("\\frac{3}{4}", "0.75"),
    ("\\dfrac{-3}{4}", "-0.75"),
    ("12 1/2 cups", "12.5"),
    ("5/0", "0"),
    ("1.5e3", "1500"),
    ("\u20ac20", "20"),
    ("She needs 5, maybe 6, eggs", "6"),
    ("12, 13, 14", "14"),
    ("in 5th place", "5"),
    ("100\u00b0", "100"),
    ("7 apples\n\nThe answer is 7.\n", "7"),
    ("0", "0"),
    ("-0", "0"),
    ("007", "7"),
    ("no number here", None),
    ("seven", None),
    ("", None),
    ("\u0663", None),  # an Arabic-Indic digit; int() would take it
]


@pytest.mark.parametrize(("text", "number"), GOLDEN)
def test_the_last_number_of_an_answer(text: str, number: str | None) -> None:
    value = last_number(text)
    assert (None if value is None else plain(value)) == number


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "It is {}.", "= {} eggs", "$ {}!"]))
def test_an_integer_is_read_back_with_and_without_commas(number: int, frame: str) -> None:
    assert last_number(frame.format(number)) == number
    assert last_number(frame.format(f"{number:,}")) == number


@given(st.decimals(-(10**6), 10**6, places=2))
def test_plain_notation_keeps_the_value(number: Decimal) -> None:
    assert Decimal(plain(number)) == number
    assert "E" not in plain(number)


@given(st.text(alphabet="0123456789.,-$/e{}\\ fracx%\u2212", max_size=40))
def test_any_text_gives_a_number_or_none(text: str) -> None:
    value = last_number(text)
    assert (value is None) == (not any(c.isdigit() for c in text))


def test_scores_compare_values_and_count_what_has_no_number() -> None:
    assert score_number("1234", "That is $1,234.00.").correct
    wrong = score_number("1234", "1,235")
    assert (wrong.correct, wrong.extracted, wrong.failure) == (False, "1235", None)
    none = score_number("5", "five")
    assert (none.correct, none.extracted, none.failure) == (False, None, NO_NUMBER)


@pytest.mark.parametrize(
    ("solution", "gold"), [("so\n#### 1,234", "1234"), ("#### -3", "-3"), ("#### 2.50", "2.5")]
)
def test_gold_numbers(solution: str, gold: str) -> None:
    assert gold_number(solution) == gold


@pytest.mark.parametrize("solution", ["7", "#### ", "#### seven", "#### 7 apples", "#### 7\n8"])
def test_a_solution_without_a_gold_number_is_refused(solution: str) -> None:
    with pytest.raises(ValueError, match="####"):
        gold_number(solution)


def test_every_gold_answer_of_gsm8k_parses_and_agrees_with_its_solution(shared: Path) -> None:
    lines = (shared / "data/gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    assert len(solutions) == 1319
    for solution in solutions:
        assert score_number(gold_number(solution), solution).correct, solution
