"""Questions about pictures: how they are put to the agents, and how answers are scored.

MathVista's own evaluation lets a language model extract the answer; here rules do, so that a score
never depends on a service.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Literal, get_args

from workloads.answers import NO_NUMBER, numbers, plain
from workloads.base import Score
from workloads.choices import labels, score_choice

NO_LIST = "no list in the answer"
NO_TEXT = "no text in the answer"

AnswerType = Literal["text", "integer", "float", "list"]

# What an answer is announced with. A later announcement replaces an earlier one.
_MARK = re.compile(
    r"\b(?:answer|result|value)\b(?:\s+(?:is|would\s+be|equals))?\s*(?:approximately|about)?\s*[:=]?"
    r"|\\boxed\s*(?=\{)",
    re.IGNORECASE,
)
# "m/s^2", "cm\u00b2", "m^{3}": the power of a unit is no number.
_POWER = re.compile(r"(?<=[A-Za-z)])\s*(?:\^\s*\{?-?[0-9]+\}?|[\u00b2\u00b3])")
_WORD = re.compile(
    r"\b(?:(zero)|(one)|(two)|(three)|(four)|(five)|(six)|(seven)|(eight)|(nine)|(ten)|(eleven)"
    r"|(twelve))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Question:
    """A question about a picture.

    Attributes:
        answer: gold answer; one of ``choices`` where there are any.
        precision: decimals of a ``float`` answer.

    Raises:
        ValueError: an answer that is not of its type.
    """

    text: str
    answer: str
    answer_type: AnswerType
    choices: tuple[str, ...] = ()
    unit: str | None = None
    precision: int | None = None

    def __post_init__(self) -> None:
        if self.answer_type not in get_args(AnswerType):
            raise ValueError(f"unknown answer type {self.answer_type!r}")
        if self.choices:
            if self.answer not in self.choices:
                raise ValueError(f"the answer {self.answer!r} is none of the choices")
        elif self.answer_type in ("integer", "float"):
            _number(self.answer)
        elif self.answer_type == "list":
            _gold_list(self.answer)

    @property
    def prompt(self) -> str:
        """The question as agents read it: choices, and the form of the answer."""
        lines = [self.text]
        if self.choices:
            letters = labels(self.choices)
            lines += [f"({n}) {c}" for n, c in zip(letters, self.choices, strict=False)] or [
                f"Choices: {', '.join(self.choices)}"
            ]
            lines.append(f"Answer with {'the letter of a choice' if letters else 'a choice'}.")
        elif self.answer_type == "integer":
            lines.append(f"Answer with a whole number{self._of_unit}.")
        elif self.answer_type == "float":
            plural = "" if self.precision == 1 else "s"
            digits = f" rounded to {self.precision} decimal{plural}" if self.precision else ""
            lines.append(f"Answer with a number{digits}{self._of_unit}.")
        elif self.answer_type == "list":
            lines.append("Answer with a list of numbers, for example [1, 2, 3].")
        return "\n".join(lines)

    @property
    def _of_unit(self) -> str:
        return f" ({self.unit})" if self.unit else ""

    def score(self, output: str) -> Score:
        """Compare an agent's text with the gold answer."""
        if self.choices:
            return score_choice(self.choices, self.choices.index(self.answer), output)
        if self.answer_type == "list":
            return _score_list(self.answer, output)
        if self.answer_type == "text":
            return _score_text(self.answer, output)
        return self._score_number(output)

    def _score_number(self, output: str) -> Score:
        expected, found = self._rounded(_number(self.answer)), read_number(output)
        if found is None:
            return Score(False, None, plain(expected), NO_NUMBER)
        return Score(self._rounded(found) == expected, plain(found), plain(expected))

    def _rounded(self, value: Decimal) -> Decimal:
        """To the decimals asked for; an integer must be met as it is."""
        if self.answer_type != "float" or self.precision is None:
            return value
        return value.quantize(Decimal(1).scaleb(-self.precision), ROUND_HALF_UP)


def read_number(text: str) -> Decimal | None:
    r"""The number that ``text`` gives as its answer, or None.

    The first one after the last "answer is", "result:" or ``\boxed`` (the last one of an equation
    there); without such a mark the last number of the text; without digits the last number word up
    to twelve.
    """
    text = _POWER.sub("", text)
    for mark in reversed(list(_MARK.finditer(text))):
        tail = re.split(r"\n|(?<=[^0-9.])\.(?=\s|$)|(?<=[0-9])\.(?=\s|$)", text[mark.end() :])[0]
        equation = tail.rpartition("=")[2] if "=" in tail else tail
        if found := numbers(equation):
            return found[0]
    if found := numbers(text):
        return found[-1]
    words = [match.lastindex or 0 for match in _WORD.finditer(text)]
    return Decimal(words[-1] - 1) if words else None


def _score_list(answer: str, output: str) -> Score:
    """The last list in brackets; else the numbers of the text, if they are as many."""
    expected = _gold_list(answer)
    in_brackets = re.findall(r"[\[({]([^\[\](){}]*[,;][^\[\](){}]*)[\])}]", output)
    found = numbers(in_brackets[-1].replace(",", " , ") if in_brackets else output)
    shown = str([plain(value) for value in expected]).replace("'", "")
    if not found or (not in_brackets and len(found) != len(expected)):
        return Score(False, None, shown, NO_LIST)
    read = str([plain(value) for value in found]).replace("'", "")
    return Score(found == expected, read, shown)


def _score_text(answer: str, output: str) -> Score:
    """The same words, or these words after the last "answer is"."""
    marks = list(_MARK.finditer(output))
    said = _words(output[marks[-1].end() :] if marks else output)
    if not said:
        return Score(False, None, answer, NO_TEXT)
    return Score(said == _words(answer), said, answer)


def _words(text: str) -> str:
    return " ".join(re.sub(r"\b(?:the|a|an)\b|[^\w%./-]+|\.(?!\d)", " ", text.casefold()).split())


def _number(text: str) -> Decimal:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation as error:
        raise ValueError(f"the answer {text!r} is no number") from error


def _gold_list(text: str) -> list[Decimal]:
    try:
        return [Decimal(str(value)) for value in ast.literal_eval(text)]
    except (ValueError, SyntaxError, TypeError, InvalidOperation) as error:
        raise ValueError(f"the answer {text!r} is no list of numbers") from error
