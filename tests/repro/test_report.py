"""The report: one file, nothing to load, no script, every claim, table and figure in it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from repro.commands.report_run import write_report
from results.claims import CLAIM_IDS
from tests.analyses import chain, coverage, ranks

VOID = {"meta", "link", "br", "img", "hr", "input"}
LOADS = {"src", "href", "data", "action", "poster", "srcset", "formaction", "background"}


class Page(HTMLParser):
    """Checks nesting and collects ids, and addresses that a browser would follow or load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.alternatives: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.addresses += [value or "" for name, value in attrs if name in LOADS]
        if tag == "img":
            self.alternatives.append(values.get("alt"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    chain(0.1, 0.3, bench="<script>alert(1)</script>").write(folder)
    ranks({"delta": 20, "base": 24}).write(folder)
    coverage({"layer": 0.3, "deviation": 0.25, "attention": 0.3}).pack(folder)
    return write_report(folder, folder / "report.html")


@pytest.fixture(scope="module")
def page(report: Path) -> Page:
    parser = Page()
    parser.feed(report.read_text(encoding="utf-8"))
    return parser


def test_it_loads_nothing_and_runs_nothing(report: Path, page: Page) -> None:
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert not page.tags & {"script", "iframe", "object", "embed", "base", "form"}
    style = report.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style


def test_it_is_well_formed_and_links_lead_somewhere(page: Page) -> None:
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    links = {a.removeprefix("#") for a in page.addresses if a.startswith("#")}
    assert links and links <= set(page.ids)
    assert page.alternatives and all(page.alternatives)


def test_every_claim_table_and_figure_is_there(page: Page) -> None:
    assert set(CLAIM_IDS) <= set(page.ids)
    assert {f"table{number}" for number in range(1, 11)} <= set(page.ids)
    assert {f"figure{number}" for number in range(2, 14)} <= set(page.ids)


def test_verdicts_stand_with_numbers_and_records(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    claim = text.partition('id="C16"')[2].partition("</article>")[0]
    assert ">agrees<" in claim and "chained - non-chained" in claim
    assert "chain.csv</code>" in claim and "repro analyze chain" in claim
    assert "no records yet; made by: repro accuracy" in text


def test_without_records_it_says_so(tmp_path: Path) -> None:
    text = write_report(tmp_path / "none", tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"<b>{len(CLAIM_IDS)}</b>" in text
