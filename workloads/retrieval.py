"""Text that an agent looks up: passages for the terms that another agent named."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from kvcmas.errors import UserError

_TERMS = re.compile(r"^\W*search(?:\s+terms?)?\W*:(.*)$", re.IGNORECASE | re.MULTILINE)
_WORD = re.compile(r"[^\W_]+")
# Too common to tell passages apart, whatever the passages are.
_COMMON = re.compile(
    r"an?|and|are|as|at|by|for|from|in|is|it|of|on|or|that|the|these|this|to|was|were|what|which"
    r"|who|with"
)


@dataclass(frozen=True)
class Passage:
    """A titled text."""

    title: str
    text: str


class Passages(Protocol):
    """Where passages come from."""

    @property
    def sha256(self) -> str | None:
        """Hash of all passages; None where they are not known beforehand."""
        ...

    def find(self, terms: Sequence[str], limit: int) -> list[Passage]:
        """At most ``limit`` passages for ``terms``, the best first; UserError if none can be had.

        The same terms give the same passages in every run.
        """
        ...


def search_terms(output: str, limit: int = 3) -> list[str]:
    """Terms of the last line ``Search: one; two; three``; without such a line, none."""
    lines = _TERMS.findall(output)
    parts = re.split(r"[;,]", lines[-1]) if lines else []
    terms = (part.strip(" \t.*`\"'[]()") for part in parts)
    return [term for term in terms if _WORD.search(term)][:limit]


@dataclass(frozen=True)
class LocalPassages:
    """Passages of a JSON-lines file with ``title`` and ``text``, ranked by shared words.

    A word weighs as much as it is rare among the passages, in a title twice.

    Raises:
        UserError: the file cannot be read, or a line is no passage; its place is named.
    """

    path: Path

    def __post_init__(self) -> None:
        if not self._passages:
            raise UserError(f"{self.path} has no passages")

    @cached_property
    def sha256(self) -> str:
        """Hash of the file's passages in order."""
        digest = hashlib.sha256()
        for passage in self._passages:
            digest.update(f"{passage.title}\0{passage.text}\0".encode())
        return digest.hexdigest()

    def find(self, terms: Sequence[str], limit: int) -> list[Passage]:
        """See :class:`Passages`. Equal scores keep the file's order; no shared word is no match."""
        wanted = set(_words(terms))
        scores = [
            sum(self._weights[word] * count for word, count in words.items() if word in wanted)
            for words in self._words
        ]
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:limit]
        return [self._passages[i] for i in best if scores[i] > 0]

    @cached_property
    def _passages(self) -> list[Passage]:
        found = []
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read passages from {self.path}: {error}") from error
        for number, line in enumerate(lines, start=1):
            if line.strip():
                found.append(_passage(line, f"{self.path}:{number}"))
        return found

    @cached_property
    def _words(self) -> list[dict[str, int]]:
        """Per passage: 1 for a word of the text, 2 for one of the title, 3 for one of both."""
        return [
            Counter(set(_words([p.text]))) + Counter(2 * sorted(set(_words([p.title]))))
            for p in self._passages
        ]

    @cached_property
    def _weights(self) -> dict[str, float]:
        known = Counter(word for words in self._words for word in words)
        return {word: math.log(1 + len(self._words) / n) for word, n in known.items()}


def _passage(line: str, place: str) -> Passage:
    try:
        row = json.loads(line)
        title, text = row["title"], row["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place}: an object with title and text is expected") from error
    if not (isinstance(title, str) and isinstance(text, str) and text.strip()):
        raise UserError(f"{place}: title and text must be texts")
    return Passage(title.strip(), text.strip())


def _words(texts: Iterable[str]) -> list[str]:
    found = (word.lower() for text in texts for word in _WORD.findall(text))
    return [word for word in found if not _COMMON.fullmatch(word)]
