"""Multiple-choice questions of our own with known answers, for machines that reach no benchmark.

They are not MMLU and are labelled so: school knowledge that a small program can make and check. One
seed and split give the same questions everywhere, and a longer list begins with the shorter one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from workloads.base import Sample

SPLITS = ("test", "calibration")
LETTERS = "ABCD"

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_KINDS = {
    "an animal": ("dog", "horse", "frog", "eagle", "salmon", "ant", "camel", "otter", "wolf"),
    "a fruit": ("apple", "pear", "cherry", "plum", "banana", "grape", "mango", "peach", "lemon"),
    "a vehicle": ("car", "bus", "train", "bicycle", "ship", "tractor", "truck", "ferry", "tram"),
    "a tool": ("hammer", "saw", "drill", "pliers", "chisel", "wrench", "file", "shovel", "rake"),
    "a metal": ("iron", "copper", "silver", "gold", "zinc", "lead", "tin", "nickel", "aluminum"),
    "an instrument": ("violin", "flute", "drum", "piano", "harp", "cello", "trumpet", "guitar"),
    "a piece of clothing": ("coat", "shirt", "hat", "sock", "scarf", "glove", "skirt", "belt"),
}
_UNITS = (
    ("minutes", "hour", 60),
    ("seconds", "minute", 60),
    ("hours", "day", 24),
    ("days", "week", 7),
    ("months", "year", 12),
    ("centimeters", "meter", 100),
    ("grams", "kilogram", 1000),
)


class Question(NamedTuple):
    """A question with its right answer and three wrong ones."""

    subject: str
    text: str
    right: str
    wrong: Sequence[str]


def questions(split: str, *, count: int, seed: int) -> list[Sample]:
    """``count`` questions, none twice; a question's own hash decides which split may hold it.

    Raises:
        ValueError: an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"splits: {', '.join(SPLITS)}; {split}?")
    rng = random.Random(f"quiz/{split}/{seed}")
    samples: list[Sample] = []
    seen: set[str] = set()
    while len(samples) < count:
        made = rng.choice(_SUBJECTS)(rng)
        options = [made.right, *made.wrong]
        rng.shuffle(options)
        text = question_text(made.text, options)
        if text in seen or _split_of(made.text) != split:
            continue
        seen.add(text)
        samples.append(
            Sample(
                f"quiz-s{seed}-{split}-{len(samples):04d}",
                text,
                LETTERS[options.index(made.right)],
                {"subject": made.subject, "right": made.right},
            )
        )
    return samples


def question_text(question: str, options: Sequence[str]) -> str:
    """A question with its options, one a line, as the agents read it."""
    lines = (f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True))
    return "\n".join((question.strip(), *lines))


def _split_of(question: str) -> str:
    return SPLITS[hashlib.sha256(question.encode()).digest()[0] % len(SPLITS)]


def _numbers(rng: random.Random, right: int) -> list[str]:
    """Three numbers above zero near ``right``."""
    near = [n for n in range(right - 12, right + 13) if n > 0 and n != right]
    return [str(n) for n in rng.sample(near, 3)]


def _product(rng: random.Random) -> Question:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    return Question("arithmetic", f"What is {a} times {b}?", str(a * b), _numbers(rng, a * b))


def _sum(rng: random.Random) -> Question:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return Question("arithmetic", f"What is {a} plus {b}?", str(a + b), _numbers(rng, a + b))


def _largest(rng: random.Random) -> Question:
    numbers = sorted(rng.sample(range(10, 1000), 4))
    shown = ", ".join(map(str, rng.sample(numbers, 4)))
    text = f"Which of the numbers {shown} is the largest?"
    return Question("ordering", text, str(numbers[3]), [str(n) for n in numbers[:3]])


def _letter(rng: random.Random) -> Question:
    step, start = rng.randint(1, 3), rng.randrange(22)
    right = _ALPHABET[start + step]
    place = {1: "right after", 2: "two places after", 3: "three places after"}[step]
    wrong = rng.sample([c for c in _ALPHABET if c not in (right, _ALPHABET[start])], 3)
    return Question("alphabet", f"Which letter comes {place} {_ALPHABET[start]}?", right, wrong)


def _day(rng: random.Random) -> Question:
    step, start = rng.randint(1, 20), rng.randrange(7)
    right = _DAYS[(start + step) % 7]
    text = f"Which day of the week is {step} day{'s' * (step > 1)} after a {_DAYS[start]}?"
    return Question("calendar", text, right, rng.sample([d for d in _DAYS if d != right], 3))


def _odd_one(rng: random.Random) -> Question:
    kind, other = rng.sample(sorted(_KINDS), 2)
    right, wrong = rng.choice(_KINDS[other]), rng.sample(_KINDS[kind], 3)
    listed = ", ".join(rng.sample([right, *wrong], 4))
    return Question("words", f"Which of these is not {kind}: {listed}?", right, wrong)


def _kind(rng: random.Random) -> Question:
    kind, *others = rng.sample(sorted(_KINDS), 4)
    right = rng.choice(_KINDS[kind])
    wrong = [rng.choice(_KINDS[other]) for other in others]
    listed = ", ".join(rng.sample([right, *wrong], 4))
    return Question("words", f"Which of these is {kind}: {listed}?", right, wrong)


def _unit(rng: random.Random) -> Question:
    (small, large, factor), count = rng.choice(_UNITS), rng.randint(2, 12)
    right = factor * count
    wrong = [str(factor * n) for n in rng.sample([n for n in range(1, 16) if n != count], 3)]
    return Question("units", f"How many {small} are there in {count} {large}s?", str(right), wrong)


_SUBJECTS: tuple[Callable[[random.Random], Question], ...] = (
    _product,
    _sum,
    _largest,
    _letter,
    _day,
    _odd_one,
    _kind,
    _unit,
)
