"""Word problems of our own with known answers, for machines that reach no benchmark.

They are not GSM8K and are labelled so. One seed, split and difficulty give the same problems
everywhere, and a longer list begins with the shorter one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from workloads.base import Sample
from workloads.stories import NAMES, SCENES, STORIES

SPLITS = ("test", "calibration")


@dataclass(frozen=True)
class Level:
    """Arithmetic steps, the operands of sums and of products, whether a scene opens the text."""

    steps: int
    operand: tuple[int, int]
    factor: tuple[int, int]
    scene: bool


LEVELS = {
    1: Level(1, (2, 9), (2, 5), scene=False),
    2: Level(2, (2, 12), (2, 6), scene=False),
    3: Level(3, (3, 25), (2, 10), scene=True),
    4: Level(4, (5, 80), (3, 12), scene=True),
}


def problems(split: str, *, difficulty: int, count: int, seed: int) -> list[Sample]:
    """``count`` problems, no question twice; a question's own hash decides which split may hold it.

    ``answer`` is a positive integer; ``meta`` has the expression it comes from and the story's key.

    Raises:
        ValueError: an unknown split or difficulty.
    """
    if split not in SPLITS or difficulty not in LEVELS:
        raise ValueError(
            f"splits: {', '.join(SPLITS)}; difficulties: 1 to {len(LEVELS)}; {split}, {difficulty}?"
        )
    samples: list[Sample] = []
    seen: set[str] = set()
    for problem in _stream(random.Random(f"{split}/{difficulty}/{seed}"), LEVELS[difficulty]):
        if len(samples) == count:
            break
        if problem.question in seen or _split_of(problem.question) != split:
            continue
        seen.add(problem.question)
        samples.append(
            Sample(
                f"procedural-d{difficulty}-s{seed}-{split}-{len(samples):04d}",
                problem.question,
                str(problem.value),
                {"expression": problem.expression, "story": problem.story},
            )
        )
    return samples


@dataclass(frozen=True)
class _Problem:
    question: str
    expression: str
    value: int
    story: str


def _split_of(question: str) -> str:
    return SPLITS[hashlib.sha256(question.encode()).digest()[0] % len(SPLITS)]


def _stream(rng: random.Random, level: Level) -> Iterator[_Problem]:
    while True:
        problem = _draw(rng, level)
        if problem is not None:
            yield problem


def _draw(rng: random.Random, level: Level) -> _Problem | None:
    """One problem, or None where the numbers drawn cannot be split equally."""
    story = rng.choice(STORIES)
    name = rng.choice(NAMES)
    scene = [rng.choice(SCENES)] if level.scene else []
    grouped = rng.random() < (0.35 if level.steps == 1 else 0.5)
    shared = level.steps > 1 and rng.random() < 0.3

    if grouped:
        x, y = rng.randint(*level.factor), rng.randint(*level.factor)
        told, expression, value = [story.groups.format(name=name, x=x, y=y)], f"{x} * {y}", x * y
    else:
        value = rng.randint(*level.operand)
        told, expression = [story.start.format(name=name, x=value)], str(value)

    low, high = level.operand
    question = story.total
    first = rng.randrange(2)  # the two wordings take turns, so that no sentence follows its twin
    for step in range(level.steps - grouped - shared):
        subtract = value > low and rng.random() < 0.5
        if subtract:
            x = rng.randint(low, min(high, value - 1))
            told.append(story.less[(first + step) % 2].format(name=name, x=x))
            expression, value = f"{expression} - {x}", value - x
        else:
            x = rng.randint(low, high)
            told.append(story.more[(first + step) % 2].format(name=name, x=x))
            expression, value = f"{expression} + {x}", value + x
        same = story.left if subtract else story.total
        question = same if step == 0 or question == same else story.now

    if shared:
        divisors = [d for d in range(2, 13) if value % d == 0 and value > d]
        if not divisors:
            return None
        x = rng.choice(divisors)
        told.append(story.share.format(name=name, x=x))
        expression, value, question = f"({expression}) / {x}", value // x, story.each
    text = " ".join((*scene, *told, question)).format(name=name)
    return _Problem(text, expression, value, story.key)
