import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.letters import NO_LETTER, score_letter, stated_letter

# The answer as text, and the letter among A to D that it states.
LETTERS: list[tuple[str, str | None]] = [
    ("B", "B"),
    ("B.", "B"),
    ("(B)", "B"),
    ("B)", "B"),
    ("**B**", "B"),
    ("**B.**", "B"),
    ("B: Paris", "B"),
    ("B) Paris", "B"),
    ("B. Paris", "B"),
    ("B, because it is", "B"),
    ("B - Paris", "B"),
    ("b", "B"),
    ("(b)", "B"),
    ("b.", "B"),
    ("`B`", "B"),
    ('"B"', "B"),
    ("\\boxed{B}", "B"),
    ("$\\boxed{B}$", "B"),
    ("$\\boxed{\\text{B}}$", "B"),
    ("\\(B\\)", "B"),
    ("Option B", "B"),
    ("Option B.", "B"),
    ("Answer: B", "B"),
    ("Answer: (B)", "B"),
    ("Answer: b", "B"),
    ("answer: b.", "B"),
    ("Final answer: b)", "B"),
    ("**Answer:** b) Paris", "B"),
    ("Answer: a", "A"),
    ("Answer: c\nIt is the only one left.", "C"),
    ("Answer: a city in France", None),
    ("Answer: a or b", None),
    ("Answer: a) and b)", None),
    ("Answer: a, b", None),
    ("Answer: b-cells", None),
    ("Answer: e.g. Paris", None),
    ("The answer is b", None),
    ("**Answer: B**", "B"),
    ("Answer:\nB", "B"),
    ("answer - B", "B"),
    ("The answer is B.", "B"),
    ("The answer is (B).", "B"),
    ("The answer is (b).", "B"),
    ("The answer is **B**.", "B"),
    ("The answer is: B", "B"),
    ("The correct answer is option B.", "B"),
    ("The correct option is B) Paris.", "B"),
    ("The correct choice would be B.", "B"),
    ("I choose B.", "B"),
    ("I would pick B", "B"),
    ("So the answer is therefore B.", "B"),
    ("The answer is B: Paris", "B"),
    ("The answer is $B$.", "B"),
    ("The answer is \\textbf{B}", "B"),
    ("The answer is 'B'", "B"),
    ("Paris is the capital of France.\n\nB", "B"),
    ("It is Paris.\n**B**", "B"),
    ("A is wrong. The answer is B.", "B"),
    ("The answer is A. No, wait: the answer is B.", "B"),
    ("A) is wrong since... the answer is (B)", "B"),
    ("B\n\nParis is the capital.", "B"),
    ("B\nB", "B"),
    ("A good question.", None),
    ("A capital is a city.", None),
    ("A", "A"),
    ("I don't know", None),
    ("I cannot answer that.", None),
    ("", None),
    ("None of the above", None),
    ("The answer is Paris.", None),
    ("The answer is not B.", None),
    ("A and B", None),
    ("A or B", None),
    ("The answer is A or B.", None),
    ("The answer is B or C", None),
    ("The answer is (B) and (C).", None),
    ("A, B, C, D", None),
    ("E", None),
    ("The answer is E.", None),
    ("All of A, B and C", None),
    ("Both", None),
    ("The answer is a city.", None),
    ("The answer is A good one.", None),
    ("Answer: A city in France", None),
    ("A\nB", None),
    ("A. Rome\nB. Paris\nC. Oslo\nD. Bonn", None),
    ("42", None),
    ("Because", None),
    ("B-cells", None),
    ("B's", None),
    ("the answer is\n(B)", "B"),
    ("The best answer is C", "C"),
    ("Answer is D", "D"),
    ("D.", "D"),
    ("  C  ", "C"),
    ("I would say B.", None),
    ("C is the correct answer.", "C"),
    ("Choice C is correct.", "C"),
    ("(C) is correct", "C"),
    ("Option (A)", "A"),
    ("The correct answer is A.\nThe answer is A.", "A"),
    ("Critic: the answer is D because D is right", "D"),
    ("Final answer: C", "C"),
    ("ANSWER: C", "C"),
    ("answer=C", "C"),
    ("The answer: C.", "C"),
    ("```\nB\n```", "B"),
    ("1. B", None),
    ("B (Paris)", "B"),
    ("The answer is B (Paris).", "B"),
]


@pytest.mark.parametrize(("text", "letter"), LETTERS)
def test_the_letter_an_answer_states(text: str, letter: str | None) -> None:
    assert stated_letter(text) == letter


def test_the_set_is_large_enough() -> None:
    assert len(LETTERS) >= 40


def test_a_letter_beyond_the_choices_is_none() -> None:
    assert stated_letter("The answer is D.", "ABC") is None
    assert stated_letter("The answer is J.", "ABCDEFGHIJ") == "J"


@given(st.text(alphabet="ABCDEabc answeris()*.:\n\\boxed{}$'", max_size=60))
def test_any_text_states_a_choice_or_none(text: str) -> None:
    letter = stated_letter(text)
    assert letter is None or (letter in "ABCD" and letter in text.upper())


def test_letters_are_scored_and_what_states_none_is_counted() -> None:
    assert score_letter("B", "The answer is (b).").correct
    wrong = score_letter("B", "C")
    assert (wrong.correct, wrong.extracted, wrong.failure) == (False, "C", None)
    none = score_letter("B", "I cannot say.")
    assert (none.correct, none.extracted, none.failure) == (False, None, NO_LETTER)
