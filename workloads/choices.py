"""Reading a choice out of an answer: its letter, or its text.

A stated letter counts first (``workloads.letters``). Without one it is the only choice whose text
stands in the answer. Two different texts are no answer; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from workloads.base import Score
from workloads.letters import stated_letter

NO_CHOICE = "no single choice in the answer"

_LETTERLIKE = re.compile(r"\(?([A-Za-z])[).]?")


def labels(choices: Sequence[str]) -> tuple[str, ...]:
    """A letter per choice; none where the choices are letters themselves, which would mislead."""
    if all(_LETTERLIKE.fullmatch(choice.strip()) for choice in choices):
        return ()
    return tuple(ascii_uppercase[: len(choices)])


def score_choice(choices: Sequence[str], expected: int, answer: str) -> Score:
    """Compare the choice that ``answer`` names with number ``expected`` of ``choices``.

    ``extracted`` and ``expected`` of the score are letters, or texts where choices have no letters.
    """
    names = labels(choices) or tuple(choice.strip() for choice in choices)
    letters = "".join(name.strip("().").upper() for name in names)
    letter = stated_letter(answer, letters)
    found = _by_text(answer, choices) if letter is None else letters.index(letter)
    if found is None:
        return Score(False, None, names[expected], NO_CHOICE)
    return Score(found == expected, names[found], names[expected])


def _by_text(answer: str, choices: Sequence[str]) -> int | None:
    """The only choice whose text stands in the answer; a longer text hides those within it."""
    said = f" {_plain(answer)} "
    named = []
    for i in sorted(range(len(choices)), key=lambda i: -len(choices[i])):
        text = f" {_plain(choices[i])} "
        if text.strip() and text in said:
            named.append(i)
            said = said.replace(text, "  ")
    return named[0] if len(named) == 1 else None


def _plain(text: str) -> str:
    """Lower-case words and numbers, single spaces; a degree sign is part of its number."""
    text = re.sub(r"\^?\s*\\?(?:circ\b|degrees?\b)", "°", text.casefold())
    text = re.sub(r"(?<=\d)\s+(?=[a-z°%]{1,2}\b|°)", "", text)
    kept = re.sub(r"[^\w°%.+/-]+|(?<!\d)\.|\.(?!\d)", " ", text)
    return " ".join(kept.split())
