import ast
import operator
import re
from fractions import Fraction

import pytest

from workloads.procedural import LEVELS, problems
from workloads.stories import STORIES

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value_of(node: ast.expr) -> Fraction:
    """Exact value of an arithmetic expression: the second path to each answer."""
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    assert isinstance(node, ast.Constant)
    return Fraction(node.value)


def steps_of(node: ast.expr) -> int:
    return sum(isinstance(part, ast.BinOp) for part in ast.walk(node))


@pytest.mark.parametrize("difficulty", LEVELS)
def test_answers_follow_from_the_expression_and_the_text_tells_its_numbers(difficulty: int) -> None:
    for problem in problems("test", difficulty=difficulty, count=300, seed=5):
        expression = ast.parse(problem.meta["expression"], mode="eval").body
        assert value_of(expression) == int(problem.answer) > 0
        assert steps_of(expression) == difficulty
        told = re.findall(r"\d+", problem.question)
        assert told == re.findall(r"\d+", problem.meta["expression"])
        assert problem.question.endswith("?") and "{" not in problem.question


def test_problems_are_the_same_for_the_same_seed_and_a_longer_list_begins_with_the_shorter() -> (
    None
):
    few = problems("test", difficulty=2, count=20, seed=1)
    assert problems("test", difficulty=2, count=60, seed=1)[:20] == few
    assert problems("test", difficulty=2, count=20, seed=2) != few


def test_problems_of_this_version_stay_what_they_are() -> None:
    """Recorded runs name problems by id: a change of wording or drawing needs new ids."""
    first = problems("test", difficulty=1, count=1, seed=0)[0]
    assert first.id == "procedural-d1-s0-test-0000"
    assert first.question == (
        "Dmitri bakes 2 trays with 3 rolls on each tray. How many rolls does Dmitri have in total?"
    )


def test_ids_are_unique_and_no_question_is_in_both_splits() -> None:
    made = [
        p
        for split in ("test", "calibration")
        for seed in (0, 1)
        for p in problems(split, difficulty=1, count=500, seed=seed)
    ]
    assert len({p.id for p in made}) == len(made)
    by_split = [{p.question for p in made if f"-{s}-" in p.id} for s in ("test", "calibration")]
    assert not by_split[0] & by_split[1]
    one_list = problems("test", difficulty=1, count=500, seed=0)
    assert len({p.question for p in one_list}) == len(one_list)


def test_all_stories_and_all_four_operations_occur() -> None:
    made = problems("test", difficulty=2, count=400, seed=0)
    assert {p.meta["story"] for p in made} == {story.key for story in STORIES}
    assert set("+-*/") <= {c for p in made for c in p.meta["expression"]}


@pytest.mark.parametrize(("split", "difficulty"), [("train", 1), ("test", 0), ("test", 5)])
def test_unknown_splits_and_difficulties_are_refused(split: str, difficulty: int) -> None:
    with pytest.raises(ValueError, match="difficulties: 1 to 4"):
        problems(split, difficulty=difficulty, count=1, seed=0)
