import re
from collections import Counter
from datetime import date, timedelta

import pytest

from workloads.quiz import LETTERS, questions

MADE = questions("test", count=400, seed=5)


def options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-D])\. (.*)$", text, re.MULTILINE))


def solved(text: str) -> str | None:
    """The answer by a second path, for the subjects that have one."""
    question = text.partition("\n")[0]
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    if " times " in question:
        return str(numbers[0] * numbers[1])
    if " plus " in question:
        return str(sum(numbers))
    if "largest" in question:
        return str(max(numbers))
    if "day of the week" in question:
        monday = date(2024, 1, 1)
        names = {(monday + timedelta(i)).strftime("%A"): i for i in range(7)}
        start = next(i for name, i in names.items() if name in question)
        return (monday + timedelta(start + numbers[0])).strftime("%A")
    return None


def test_answers_are_right() -> None:
    checked = 0
    for sample in MADE:
        shown = options(sample.question)
        assert list(shown) == list(LETTERS) and len(set(shown.values())) == 4
        assert shown[sample.answer] == sample.meta["right"]
        if expected := solved(sample.question):
            assert shown[sample.answer] == expected
            checked += 1
    assert checked > 100


def test_all_subjects_and_letters_occur() -> None:
    subjects = Counter(sample.meta["subject"] for sample in MADE)
    assert set(subjects) == {"arithmetic", "ordering", "alphabet", "calendar", "words", "units"}
    letters = Counter(sample.answer for sample in MADE)
    assert set(letters) == set(LETTERS) and min(letters.values()) > 60


def test_questions_repeat_for_a_seed_and_differ_between_splits_and_seeds() -> None:
    few = questions("test", count=20, seed=5)
    assert MADE[:20] == few
    assert questions("test", count=20, seed=6) != few
    other = questions("calibration", count=400, seed=5)
    heads = [{s.question.partition("\n")[0] for s in samples} for samples in (MADE, other)]
    assert not heads[0] & heads[1]
    assert len({s.id for s in (*MADE, *other)}) == 800


def test_questions_of_this_version_stay_what_they_are() -> None:
    """Recorded runs name questions by id: a change of wording or drawing needs new ids."""
    first = questions("test", count=1, seed=0)[0]
    assert (first.id, first.answer) == ("quiz-s0-test-0000", "A")
    assert (
        first.question == "How many seconds are there in 7 minutes?\nA. 420\nB. 780\nC. 300\nD. 60"
    )


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="test, calibration"):
        questions("train", count=1, seed=0)
