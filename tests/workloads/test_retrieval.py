import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvcmas.errors import UserError
from workloads.retrieval import LocalPassages, Passage, search_terms
from workloads.wikipedia import WikipediaPassages

ROWS = [
    {"title": "Paris", "text": "Paris is the capital of France."},
    {"title": "Seine", "text": "A river in France. It flows through Paris."},
    {"title": "Oslo", "text": "The capital of Norway."},
]


@pytest.fixture
def passages(tmp_path: Path) -> LocalPassages:
    path = tmp_path / "passages.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return LocalPassages(path)


@pytest.mark.parametrize(
    ("output", "terms"),
    [
        ("Search: Paris; Seine; Oslo; Rome", ["Paris", "Seine", "Oslo"]),
        ("It is about rivers.\nSearch: the Seine, Paris.", ["the Seine", "Paris"]),
        ("**Search:** `Paris`", ["Paris"]),
        ("search terms: (Paris)", ["Paris"]),
        ("Search: old\nSearch: new", ["new"]),
        ("Search: ;;", []),
        ("Paris and the Seine", []),
        ("", []),
    ],
)
def test_terms_are_read_from_the_last_search_line(output: str, terms: list[str]) -> None:
    assert search_terms(output) == terms


def test_the_best_passage_shares_rare_words_and_the_title(passages: LocalPassages) -> None:
    def titles(*terms: str, limit: int = 3) -> list[str]:
        return [passage.title for passage in passages.find(terms, limit)]

    assert titles("Paris") == ["Paris", "Seine"]
    assert titles("which river flows through Paris?") == ["Seine", "Paris"]
    assert titles("capital") == ["Paris", "Oslo"]
    assert titles("capital", limit=1) == ["Paris"]
    assert titles("capital", "Norway") == ["Oslo", "Paris"]
    assert titles("OSLO") == ["Oslo"]
    assert titles("of the in") == []
    assert titles("volcano") == []


def test_the_hash_covers_the_passages(passages: LocalPassages, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("\n" + "".join(json.dumps(row) + "\n\n" for row in ROWS))
    assert LocalPassages(other).sha256 == passages.sha256
    other.write_text("".join(json.dumps(row | {"text": "x"}) + "\n" for row in ROWS))
    assert LocalPassages(other).sha256 != passages.sha256


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "has no passages"),
        ("{", r"p\.jsonl:1: an object with title and text"),
        ('{"title": "a", "text": "b"}\n{"title": "a"}', r"p\.jsonl:2: an object"),
        ('["a"]', r"p\.jsonl:1: an object"),
        ('{"title": "a", "text": " "}', "must be texts"),
        (None, "cannot read passages"),
    ],
)
def test_files_without_passages_are_named(
    tmp_path: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=complaint):
        LocalPassages(path)


class Page:
    def __init__(self, summary: str) -> None:
        self.summary = summary


class Client:
    """Answers as the Wikipedia client does, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def search(self, query: str, *, limit: int) -> Any:
        self.asked.append(query)
        if query == "broken":
            raise sys.modules["wikipediaapi"].WikipediaException("no route")
        pages = {query: Page(f"{query} is known. "), f"{query} (film)": Page("")}
        return types.SimpleNamespace(pages=pages)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    module = types.ModuleType("wikipediaapi")
    module.WikipediaException = type("WikipediaException", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wikipediaapi", module)
    return Client()


def test_wikipedia_is_asked_once(tmp_path: Path, client: Client) -> None:
    first = WikipediaPassages(folder=tmp_path / "kept", client=client)
    found = first.find(["Paris", "Oslo"], 3)
    assert found == [Passage("Paris", "Paris is known."), Passage("Oslo", "Oslo is known.")]
    again = WikipediaPassages(folder=tmp_path / "kept", client=client)
    assert again.find(["Paris", "Oslo"], 3) == found
    assert client.asked == ["Paris", "Oslo"]
    assert WikipediaPassages("de", tmp_path / "kept", client).find(["Paris"], 3)
    assert client.asked == ["Paris", "Oslo", "Paris"]
    kept = [json.loads(path.read_text()) for path in (tmp_path / "kept").iterdir()]
    assert {(row["term"], row["language"]) for row in kept} == {
        ("Paris", "en"),
        ("Oslo", "en"),
        ("Paris", "de"),
    }


def test_what_goes_wrong_is_said_in_one_line(tmp_path: Path, client: Client) -> None:
    source = WikipediaPassages(folder=tmp_path, client=client)
    with pytest.raises(UserError, match=r"cannot be asked about 'broken' \(no route\)"):
        source.find(["broken"], 1)
    source.find(["Paris"], 1)
    (kept,) = tmp_path.iterdir()
    kept.write_text("{")
    with pytest.raises(UserError, match="is damaged; delete it"):
        source.find(["Paris"], 1)


def test_the_extra_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wikipediaapi", None)
    with pytest.raises(UserError, match=r"pip install 'kvcmas-repro\[wikipedia\]'"):
        WikipediaPassages(folder=tmp_path).find(["Paris"], 1)
