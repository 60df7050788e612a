"""Streams of our own questions: each task in turn, nothing twice, splits that never share one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from workloads.vision_questions import Question

SPLITS = ("test", "calibration")

T = TypeVar("T")


@dataclass(frozen=True)
class Asked(Generic[T]):
    """The description of a picture or a clip, and what is asked about it."""

    subject: T
    question: Question
    task: str


def draw_questions(
    name: str,
    tasks: Sequence[Callable[[random.Random], Asked[T]]],
    split: str,
    *,
    count: int,
    seed: int,
) -> list[Asked[T]]:
    """``count`` questions; the hash of subject and question decides which split may hold it.

    Raises:
        ValueError: an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"own {name} have the splits {' and '.join(SPLITS)}, not {split!r}")
    rng, made, seen = random.Random(f"{name}/{split}/{seed}"), list[Asked[T]](), set[bytes]()
    while len(made) < count:
        one = tasks[len(made) % len(tasks)](rng)
        mark = hashlib.sha256(repr((one.subject, one.question.text)).encode()).digest()
        if mark not in seen and SPLITS[mark[0] % len(SPLITS)] == split:
            seen.add(mark)
            made.append(one)
    return made
