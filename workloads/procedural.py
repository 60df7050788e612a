"""Word problems of our own with known answers, for machines that reach no benchmark.

They are not GSM8K and are labelled so. One seed, split and difficulty give the same problems
everywhere; a longer list begins with the shorter one.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from workloads.base import Sample
from workloads.stories import NAMES, SCENES, STORIES, Story

SPLITS = ("test", "calibration")


@dataclass(frozen=True)
class Level:
    """Arithmetic steps of a problem and the operands they draw from (``factor``: of products)."""

    steps: int
    operand: tuple[int, int]
    factor: tuple[int, int]


LEVELS = {
    1: Level(1, (2, 10), (2, 5)),
    2: Level(2, (2, 12), (2, 6)),
    3: Level(3, (3, 25), (2, 10)),
    4: Level(4, (5, 80), (3, 12)),
}


def problems(split: str, *, difficulty: int, count: int, seed: int) -> list[Sample]:
    """``count`` problems with no question twice. A question's own hash decides which split may hold it.

    ``answer`` is a positive integer; ``meta`` has the expression it comes from and the story's key.

    Raises:
        ValueError: an unknown split or difficulty.
    """
    if split not in SPLITS or difficulty not in LEVELS:
        raise ValueError(f"splits are {', '.join(SPLITS)}, difficulties 1 to {len(LEVELS)}: {split}, {difficulty}")
    rng = random.Random(f"{split}/{difficulty}/{seed}")
    samples: dict[str, Sample] = {}
    while len(samples) < count:
        question, expression, answer, story = _problem(rng, LEVELS[difficulty])
        if _split_of(question) != split or question in samples:
            continue
        name = f"procedural-d{difficulty}-s{seed}-{split}-{len(samples):04d}"
        samples[question] = Sample(name, question, str(answer), {"expression": expression, "story": story.key})
    return list(samples.values())


def _split_of(question: str) -> str:
    return SPLITS[hashlib.sha256(question.encode()).digest()[0] % len(SPLITS)]


def _problem(rng: random.Random, level: Level) -> tuple[str, str, int, Story]:
    """Question, expression, answer, story."""
    story, name, scene = rng.choice(STORIES), rng.choice(NAMES), rng.choice(SCENES)
    steps = level.steps
    if grouped := rng.random() < (0.3 if steps == 1 else 0.5):
        x, y = rng.randint(*level.factor), rng.randint(*level.factor)
        sentences, expression, value = [story.groups.format(name=name, x=x, y=y)], f"{x} * {y}", x * y
    else:
        value = rng.randint(*level.operand)
        sentences, expression = [story.start.format(name=name, x=value)], str(value)
    shared = steps > 1 and rng.random() < 0.3
    low, high = level.operand
    first = rng.randrange(2)  # wordings take turns, so that no sentence follows its twin
    for step in range(steps - grouped - shared):
        if value > low and rng.random() < 0.5:
            x = rng.randint(low, min(high, value - 1))
            sentences.append(story.less[(first + step) % 2].format(name=name, x=x))
            expression, value = f"{expression} - {x}", value - x
        else:
            x = rng.randint(low, high)
            sentences.append(story.more[(first + step) % 2].format(name=name, x=x))
            expression, value = f"{expression} + {x}", value + x
    divisors = [d for d in range(2, 13) if value % d == 0 and value > d]
    if shared and divisors:
        x = rng.choice(divisors)
        sentences += [story.share.format(name=name, x=x), story.ask_share.format(name=name)]
        expression, value = f"({expression}) / {x}", value // x
    elif shared:
        return _problem(rng, level)  # a prime number cannot be shared; draw again
    else:
        sentences.append(story.ask.format(name=name))
    opening = [scene.format(name=name)] if scene else []
    return " ".join(opening + sentences), expression, value, story
