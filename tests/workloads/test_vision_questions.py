"""The golden set of answers to MathVista's kinds of questions, and the rows they come from."""

from __future__ import annotations

from typing import Any

import pytest

from workloads.answers import NO_NUMBER
from workloads.choices import NO_CHOICE
from workloads.vision_questions import NO_LIST, NO_TEXT, Question

WHOLE = Question("How many?", "4232", "integer")
ONE = Question("How far?", "5.8", "float", precision=1)
TWO = Question("How far?", "0.73", "float", precision=2)
MINUS = Question("How much?", "-4.3", "float", precision=1)
YEARS = Question("How old?", "12", "integer", unit="years")
ANGLE = Question("How wide?", "145°", "text", ("135°", "140°", "145°", "150°"))
YES = Question("Is it?", "Yes", "text", ("Yes", "No"))
LIST = Question("Which?", "[0, 2, 1, 7]", "list")
SPAN = Question("Which two years?", "[2014, 2016]", "list")
TEXT = Question("What is it called?", "a Golgi body", "text")

# question, answer, what is read, whether it is right
GOLDEN: list[tuple[Question, str, str | None, bool]] = [
    (WHOLE, "4232", "4232", True),
    (WHOLE, "4,232", "4232", True),
    (WHOLE, "The answer is 4,232 N.", "4232", True),
    (WHOLE, "The answer is $4{,}232$.", "4232", True),
    (WHOLE, "4232.0", "4232", True),
    (WHOLE, "\\boxed{4232}", "4232", True),
    (WHOLE, "So \\boxed{4232} N, found in 3 steps.", "4232", True),
    (WHOLE, "F = 46 * 92 = 4232", "4232", True),
    (WHOLE, "The answer is F = 46 * 92 = 4232 N", "4232", True),
    (WHOLE, "The answer is 4232. It took 2 steps.", "4232", True),
    (WHOLE, "The answer is 4000.\nNo: the answer is 4232.", "4232", True),
    (WHOLE, "The answer is 4231.7", "4231.7", False),
    (WHOLE, "Roughly 4000.", "4000", False),
    (WHOLE, "```\n4232\n```", "4232", True),
    (WHOLE, "**4232**", "4232", True),
    (WHOLE, "I cannot read the plot.", None, False),
    (WHOLE, "", None, False),
    (YEARS, "12 years", "12", True),
    (YEARS, "He is twelve years older.", "12", True),
    (YEARS, "Twelve", "12", True),
    (YEARS, "There are two people. The answer is 12.", "12", True),
    (YEARS, "Someone is older.", None, False),
    (ONE, "5.8", "5.8", True),
    (ONE, "The answer is 5.8 m/s^2.", "5.8", True),
    (ONE, "The answer is about 5.83 m/s².", "5.83", True),
    (ONE, "a = 5.8 m/s^2", "5.8", True),
    (ONE, "The area is 5.8 cm^{2}", "5.8", True),
    (ONE, "5.75", "5.75", True),
    (ONE, "5.7", "5.7", False),
    (ONE, "6", "6", False),
    (ONE, "The final answer is: $\\boxed{5.8\\ \\mathrm{m}}$", "5.8", True),
    (ONE, "Result: 58/10", "5.8", True),
    (ONE, "$5.80", "5.8", True),
    (TWO, ".73", "0.73", True),
    (TWO, "0.734", "0.734", True),
    (TWO, "73%", "73", False),
    (TWO, "7.3e-1", "0.73", True),
    (TWO, "\\frac{73}{100}", "0.73", True),
    (TWO, "0,73", "73", False),
    (MINUS, "-4.3", "-4.3", True),
    (MINUS, "\u22124.3 °C", "-4.3", True),
    (MINUS, "4.3", "4.3", False),
    (MINUS, "The answer is minus four.", "4", False),
    (ANGLE, "C", "C", True),
    (ANGLE, "(B)", "B", False),
    (ANGLE, "145 degrees", "C", True),
    (ANGLE, "The angle is 145°.", "C", True),
    (ANGLE, "The answer is 145°", "C", True),
    (ANGLE, "160°", None, False),
    (YES, "yes", "A", True),
    (YES, "No, it is not.", "B", False),
    (YES, "It depends.", None, False),
    (LIST, "[0, 2, 1, 7]", "[0, 2, 1, 7]", True),
    (LIST, "[0,2,1,7]", "[0, 2, 1, 7]", True),
    (LIST, "The code is (0, 2, 1, 7).", "[0, 2, 1, 7]", True),
    (LIST, "First [1, 1, 1, 1], then [0, 2, 1, 7]", "[0, 2, 1, 7]", True),
    (LIST, "0 2 1 7", "[0, 2, 1, 7]", True),
    (LIST, "[2, 0, 1, 7]", "[2, 0, 1, 7]", False),
    (LIST, "[0, 2, 1]", "[0, 2, 1]", False),
    (LIST, "0217", None, False),
    (LIST, "No code is shown.", None, False),
    (SPAN, "Between 2014 and 2016.", "[2014, 2016]", True),
    (SPAN, "[2014, 2016]", "[2014, 2016]", True),
    (SPAN, "In 2014.", None, False),
    (TEXT, "Golgi body", "golgi body", True),
    (TEXT, "The answer is: the Golgi body.", "golgi body", True),
    (TEXT, "A ribosome", "ribosome", False),
    (TEXT, " ", None, False),
]
FAILURES = {
    "integer": NO_NUMBER,
    "float": NO_NUMBER,
    "list": NO_LIST,
}


@pytest.mark.parametrize(("question", "answer", "read", "correct"), GOLDEN)
def test_golden(question: Question, answer: str, read: str | None, correct: bool) -> None:
    score = question.score(answer)
    assert (score.extracted, score.correct) == (read, correct)
    missed = NO_CHOICE if question.choices else FAILURES.get(question.answer_type, NO_TEXT)
    assert score.failure == (None if read is not None else missed)


def test_the_golden_set_is_large_enough() -> None:
    assert len({(id(question), answer) for question, answer, _, _ in GOLDEN}) == len(GOLDEN) >= 40


def test_expected_answers_are_shown_as_they_are_compared() -> None:
    assert ONE.score("5.8").expected == "5.8"
    assert Question("?", "2", "float", precision=1).score("2.04").correct
    assert YES.score("").expected == "A"
    assert LIST.score("").expected == "[0, 2, 1, 7]"


def test_prompts_say_what_form_the_answer_has() -> None:
    assert YES.prompt == "Is it?\n(A) Yes\n(B) No\nAnswer with the letter of a choice."
    assert ONE.prompt == "How far?\nAnswer with a number rounded to 1 decimal."
    assert YEARS.prompt.endswith("\nAnswer with a whole number (years).")
    assert "list of numbers" in LIST.prompt
    panels = Question("Which?", "(b)", "text", ("(c)", "(a)", "(b)"))
    assert panels.prompt == "Which?\nChoices: (c), (a), (b)\nAnswer with a choice."


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"answer": "much"}, "'much' is no number"),
        ({"answer_type": "essay"}, "unknown answer type 'essay'"),
        ({"answer_type": "list"}, "'1.2' is no list"),
        ({"choices": ("1.3", "1.4")}, "'1.2' is none of the choices"),
    ],
)
def test_an_answer_that_is_not_of_its_type_is_refused(
    changes: dict[str, Any], complaint: str
) -> None:
    made = {"text": "How long?", "answer": "1.2", "answer_type": "float", **changes}
    with pytest.raises(ValueError, match=complaint):
        Question(**made)
