r"""Reading a choice out of an answer: its letter, or its text.

A letter counts where it cannot be a word: in brackets, in ``\boxed{}``, after "answer", "option" or
"choice", or alone. Where several different letters are named and nothing says which one is the
answer, there is no answer; nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from workloads.base import Score

NO_CHOICE = "no choice in the answer"
SEVERAL = "several choices in the answer"

# What may follow a letter that is no word: the end, punctuation, or words that go on about it.
_AFTER = r"(?=\s*(?:$|[\])}.,:;!*\"'`\n$])|\s+(?:because|since|as|is|was|which|for|and|with|-)\b)"
_STRONG = (
    re.compile(r"\\boxed\s*\{\s*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{)?\s*\(?([A-Za-z])\)?\s*\}"),
    re.compile(
        r"\b(?:answer|choice|option|letter)\b(?:\s+(?:is|would\s+be|must\s+be|should\s+be))?"
        r"\s*[:=]?\s*(?:(?:the\s+)?(?:choice|option|letter)\s+)?[*_`\"'$]*[(\[]?([A-Za-z])[)\]]?"
        + _AFTER,
        re.IGNORECASE,
    ),
)
_WEAK = (
    re.compile(r"[(\[]([A-Za-z])[)\]]"),
    re.compile(r"(?:^|\n)[\s*_`\"']*([A-Za-z])[\s*_`\"']*(?=[.):,]\s|[.):]?\s*(?:$|\n))"),
    # "A" and "I" are words, unless another letter goes with them.
    re.compile(
        r"(?<![\w'(\[])((?:[B-HJ-Z](?![\w'])"
        + _AFTER
        + r")|[AI](?=\s*(?:or|and|/|,)\s*[A-Z](?![\w'])))"
    ),
)
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
    names = labels(choices)
    if names:
        letters = dict(zip(names, range(len(choices)), strict=True))
    else:
        names = tuple(choice.strip() for choice in choices)
        letters = {name.strip("().").upper(): i for i, name in enumerate(names)}
    found, failure = _by_letter(answer, letters)
    if found is None and failure == NO_CHOICE:
        found, failure = _by_text(answer, choices)
    if found is None:
        return Score(False, None, names[expected], failure)
    return Score(found == expected, names[found], names[expected])


def _by_letter(answer: str, letters: dict[str, int]) -> tuple[int | None, str]:
    """The choice whose letter is named; a marked letter counts before a bare one, the last last."""
    for pattern in _STRONG:
        if found := [m[1].upper() for m in pattern.finditer(answer) if m[1].upper() in letters]:
            return letters[found[-1]], ""
    for pattern in _WEAK:
        named = {m[1].upper() for m in pattern.finditer(answer)} & letters.keys()
        if len(named) > 1:
            return None, SEVERAL
        if named:
            return letters[named.pop()], ""
    return None, NO_CHOICE


def _by_text(answer: str, choices: Sequence[str]) -> tuple[int | None, str]:
    """The only choice whose text stands in the answer; a longer text hides those within it."""
    said = f" {_plain(answer)} "
    named = []
    for i in sorted(range(len(choices)), key=lambda i: -len(choices[i])):
        text = f" {_plain(choices[i])} "
        if text.strip() and text in said:
            named.append(i)
            said = said.replace(text, "  ")
    if len(named) == 1:
        return named[0], ""
    return None, SEVERAL if named else NO_CHOICE


def _plain(text: str) -> str:
    """Lower-case words and numbers, single spaces; a degree sign is part of its number."""
    text = re.sub(r"\^?\s*\\?(?:circ\b|degrees?\b)", "°", text.casefold())
    text = re.sub(r"(?<=\d)\s+(?=[a-z°%]{1,2}\b|°)", "", text)
    kept = re.sub(r"[^\w°%.+/-]+|(?<!\d)\.|\.(?!\d)", " ", text)
    return " ".join(kept.split())
