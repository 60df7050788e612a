"""The golden set of answers to four-way questions: what is read, and what is refused."""

from __future__ import annotations

import pytest

from workloads.choices import NO_CHOICE, labels, score_choice

CARS = ("A red car", "The blue car.", "A truck", "Nothing of this")

# answer, letter that is read
READ = [
    ("B", "B"),
    ("b", "B"),
    ("B.", "B"),
    ("(B)", "B"),
    ("D)", "D"),
    ("**C**", "C"),
    ("`A`", "A"),
    ("A\n", "A"),
    ("A: because it is red.", "A"),
    ("The answer is B.", "B"),
    ("the answer is: (c)", "C"),
    ("The correct answer is **D**.", "D"),
    ("Answer: A", "A"),
    ("ANSWER = C", "C"),
    ("Final answer: $\\boxed{D}$", "D"),
    ("\\boxed{\\text{B}}", "B"),
    ("\\boxed{(a)}", "A"),
    ("The best answer is option C.", "C"),
    ("Option B is right.", "B"),
    ("I choose option (D), because nothing fits.", "D"),
    ("The correct choice is A", "A"),
    ("(A) and (B) are wrong. The answer is (C).", "C"),
    ("At first I thought the answer is A. On reflection, the answer is D.", "D"),
    ("I think a person drives. Answer: C.", "C"),
    ("D. Nothing of this", "D"),
    ("C) A truck", "C"),
    ("The answer is A truck", "C"),
    ("It shows a truck.", "C"),
    ("the BLUE car", "B"),
    ("```\nB\n```", "B"),
    ("The answer would be letter B", "B"),
    ("Answer:\nD", "D"),
    ("The answer is 'A'.", "A"),
]

REFUSED = [
    ("", NO_CHOICE),
    ("   \n", NO_CHOICE),
    ("I cannot answer this from the frames.", NO_CHOICE),
    ("I am sorry, but as an AI I see no video.", NO_CHOICE),
    ("A person walks through a park.", NO_CHOICE),
    ("There is a car in the picture.", NO_CHOICE),
    ("42", NO_CHOICE),
    ("E", NO_CHOICE),
    ("The answer is E.", NO_CHOICE),
    ("(A), (B), (C) or (D)", NO_CHOICE),
    ("A or B", NO_CHOICE),
    ("a red car or the blue car", NO_CHOICE),
    ("The answer is a matter of taste.", NO_CHOICE),
    ("An answer a day.", NO_CHOICE),
]


@pytest.mark.parametrize(("answer", "letter"), READ)
def test_a_choice_is_read(answer: str, letter: str) -> None:
    score = score_choice(CARS, "ABCD".index(letter), answer)
    assert (score.extracted, score.correct, score.failure) == (letter, True, None)
    other = score_choice(CARS, ("ABCD".index(letter) + 1) % 4, answer)
    assert (other.extracted, other.correct) == (letter, False)


@pytest.mark.parametrize(("answer", "failure"), REFUSED)
def test_nothing_is_guessed(answer: str, failure: str) -> None:
    score = score_choice(CARS, 0, answer)
    assert (score.extracted, score.correct, score.failure) == (None, False, failure)
    assert score.expected == "A"


def test_the_golden_set_is_large_enough() -> None:
    assert len(READ) + len(REFUSED) >= 40
    assert len({answer for answer, _ in (*READ, *REFUSED)}) == len(READ) + len(REFUSED)


def test_numbers_and_units_as_choices() -> None:
    angles = ("135°", "140°", "145°", "150°")
    for answer in ("145°", "It is 145 degrees.", "The angle is $145^\\circ$.", "C", "(C) 145°"):
        assert score_choice(angles, 2, answer).correct, answer
    assert score_choice(("6cm", "16cm"), 0, "The side is 6 cm long.").correct
    assert score_choice(("4", "5", "5.5", "6"), 2, "5.5").correct
    assert score_choice(("4", "5", "5.5", "6"), 2, "15.5").failure == NO_CHOICE


def test_a_longer_choice_hides_one_within_it() -> None:
    clock = ("half", "quarter", "o'clock", "quarter to", "quarter past")
    assert score_choice(clock, 3, "It is quarter to six.").extracted == "D"
    assert score_choice(clock, 1, "a quarter").correct


def test_choices_that_are_letters_have_no_letters_of_their_own() -> None:
    """MathVista has such rows, in an order that is not the alphabet's."""
    panels = ("(c)", "(a)", "(e)", "(d)", "(b)")
    assert labels(panels) == () and labels(CARS) == ("A", "B", "C", "D")
    for answer in ("(b)", "b", "The answer is (b).", "Panel (b) fits.", "\\boxed{b}"):
        score = score_choice(panels, 4, answer)
        assert (score.extracted, score.expected, score.correct) == ("(b)", "(b)", True), answer
    assert score_choice(("A", "B", "C", "D", "E"), 4, "E").extracted == "E"


def test_yes_and_no() -> None:
    for answer in ("Yes", "yes.", "Yes, it is.", "A", "(A) Yes", "The answer is yes"):
        assert score_choice(("Yes", "No"), 0, answer).correct, answer
    assert score_choice(("True", "False"), 1, "This is false.").correct
