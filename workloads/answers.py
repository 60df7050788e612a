r"""Reading a number out of an answer: the last one, in whatever dress it comes.

Thousands separators (``1,234``, ``1{,}234``, ``1\,234``), currency signs, units, a percent sign and
a final full stop do not matter; ``3/4`` and ``\frac{3}{4}`` are numbers and so is the ``1 3/4`` of
recipes. Number words ("seven") are not read: such an answer has no number, which is counted.
"""

from __future__ import annotations

import re
from decimal import Decimal

from workloads.base import Score

NO_NUMBER = "no number in the answer"

_LATEX = (
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?[0-9.]+)\s*\}\s*\{\s*([0-9.]+)\s*\}"), r" \1/\2"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!;: ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"), ","),
    (re.compile(r"[\u2212\u2013\ufe63\uff0d](?=[0-9.$\u20ac\u00a3])"), "-"),
    (re.compile(r"\\\$"), "$"),
)
# A minus is a sign only where it cannot be an operator or a range: "16-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]%.])-)?
    [$\u20ac\u00a3\u00a5\u20b9]?
    (?P<inner>(?<=[$\u20ac\u00a3\u00a5\u20b9])-)?
    (?P<whole>
        (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?
        | (?<![0-9])\.[0-9]+
    )
    (?:[eE](?P<exponent>[+-]?[0-9]{1,2})(?![\w.]))?
    (?:(?P<mixed>\s[0-9]+)?/(?P<divisor>0*[1-9][0-9]*)(?![\w/]))?
    """,
    re.VERBOSE,
)


def numbers(text: str) -> list[Decimal]:
    """All numbers in ``text``, in order."""
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return [_value(match) for match in _NUMBER.finditer(text)]


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``, or None."""
    found = numbers(text)
    return found[-1] if found else None


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["whole"].replace(",", ""))
    if match["exponent"]:
        value = value.scaleb(int(match["exponent"]))
    if match["divisor"] and match["mixed"]:
        value += Decimal(match["mixed"]) / Decimal(match["divisor"])
    elif match["divisor"]:
        value /= Decimal(match["divisor"])
    return -value if match["sign"] or match["inner"] else value


def plain(value: Decimal) -> str:
    """The shortest plain notation: ``5`` for ``5.00``, never an exponent."""
    text = f"{value:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def gold_number(solution: str) -> str:
    """The number after ``####`` in a GSM8K solution, in plain notation.

    Raises:
        ValueError: there is none, or more than a number stands there.
    """
    _, mark, tail = solution.rpartition("####")
    text = tail.strip().replace(",", "").removeprefix("$")
    if not mark or not re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", text, re.ASCII):
        raise ValueError(f"no '#### number' at the end of the solution: {tail.strip()[:40]!r}")
    return plain(Decimal(text))


def score_number(expected: str, answer: str) -> Score:
    """Compare the last number of ``answer`` with ``expected`` (plain notation) as decimals."""
    value = last_number(answer)
    if value is None:
        return Score(False, None, expected, NO_NUMBER)
    return Score(value == Decimal(expected), plain(value), expected)
