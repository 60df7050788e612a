"""Reading the letter of a choice out of an answer, strictly.

It is the one that the text states as its answer ("the answer is (B)", "B is correct"), else one
that it begins with ("B.", "B) Paris", "**B**") or that stands alone on its last line. An article, a
list of letters or the choices said again are no answer, and two different letters are none.
"""

from __future__ import annotations

import re

from workloads.base import Score

NO_LETTER = "no single letter in the answer"

_DRESS = (
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\boxed\s*\{([^{}]*)\}"), r" answer: \1 "),
    (re.compile(r"\\[()\[\]]|[*`$\"\u201c\u201d_]"), ""),
    (re.compile(r"'([A-Za-z])'"), r"\1"),
)
_BRACKETED = re.compile(r"\(([A-Za-z])\)")
# "A" is an article too: it is a letter where no word follows, or one that goes on about a choice.
_LETTER = r"""(?P<letter>
    A(?=\)|\s*[.:,;(\n]|\s*$|\s+[-\u2013\u2014]|\s+(?:because|since|as|for|or|and)\b)
    | [B-Z](?![\w'\u2019-])
    )"""
_MORE = r"(?P<more>\)?\s*(?:or|and|&|/|,)\s*(?:option\s+)?[A-Z](?![\w'\u2019]))?"
_STATED = re.compile(
    rf"""
    (?i:\b(?:answer|option|choice)(?:\s+(?:is|was|(?:would|should|must)\s+be)|\s*[:=\u2013-])
      | \b(?:choose|chose|pick|select))
    (?i:\s+(?:therefore|thus|clearly|likely|probably|definitely|indeed))?
    \s*:?\s*
    (?i:(?:the\s+)?(?:correct\s+)?(?:option|choice|letter|answer)\s+)?
    {_LETTER}{_MORE}
    """,
    re.VERBOSE,
)
# In lower case only behind a label, where nothing goes on: "a" is an article, "b" a variable.
_LABELLED = re.compile(
    r"(?i:\banswer)\s*[:=]\s*(?P<letter>[a-j])"
    r"(?=\)(?!\s*(?:or\b|and\b|[&/,]))|[.:](?!\w)|\s*(?:\n|$))"
)
_CONFIRMED = re.compile(
    r"(?<![\w'])(?P<letter>[A-Z])\)?\s+(?:is|would\s+be)\s+(?:the\s+)?(?:correct|right|best|answer)\b"
)
_LEADING = re.compile(
    r"^(?i:(?:option|choice|answer)\s+)?"
    r"(?P<letter>[A-Z])(?=\)|\s*[.:,;(\n]|\s*$|\s+[-\u2013\u2014]\s)" + _MORE
)
_ALONE = re.compile(r"^(?i:(?:option|choice)\s+)?(?P<letter>[A-Za-z])[).]*$")
_ITEM = re.compile(r"^\s*([A-Z])[).:]\s*\S", re.MULTILINE)


def stated_letter(text: str, letters: str = "ABCD") -> str | None:
    """The letter of the choice that ``text`` gives as its answer, or None."""
    for pattern, replacement in _DRESS:
        text = pattern.sub(replacement, text)
    text = _BRACKETED.sub(lambda match: f"{match[1].upper()})", text).strip()
    patterns = (_STATED, _LABELLED, _CONFIRMED)
    stated = sorted((m for p in patterns for m in p.finditer(text)), key=re.Match.start)
    found = stated[-1:]
    if not stated and len(set(_ITEM.findall(text))) < 2:  # else the choices are only repeated
        ends = (_LEADING.match(text), *(_ALONE.match(line.strip()) for line in _ends(text)))
        found = [match for match in ends if match]
    if any(match.groupdict().get("more") for match in found):
        return None
    named = {match["letter"].upper() for match in found}
    letter = named.pop() if len(named) == 1 else None
    return letter if letter is not None and letter in letters else None


def _ends(text: str) -> tuple[str, ...]:
    lines = text.splitlines()
    return (lines[0], lines[-1]) if lines else ()


def score_letter(expected: str, answer: str, letters: str = "ABCD") -> Score:
    """Compare the letter that ``answer`` states with ``expected``."""
    letter = stated_letter(answer, letters)
    if letter is None:
        return Score(False, None, expected, NO_LETTER)
    return Score(letter == expected, letter, expected)
