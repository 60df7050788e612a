"""Figure 5-sensitivity from synthetic emulated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plots import style
from plots.sensitivity import FIGURES, pages
from results.errors import ResultsError
from results.records import Run
from results.serving import served_cells
from tests.served import served_run


def emulated(method: str, service: float, **changes: Any) -> Run:
    return served_run(method, service, mode="emulated", info={"kind": "emulate"}, **changes)


def runs() -> list[Run]:
    made = [emulated("nonshared", 2.0), emulated("kvcmas", 1.0)]
    for size, service in ((1, 0.8), (16, 1.8)):
        made.append(
            emulated(
                "cacheblend",
                service,
                label="" if size == 16 else f"page_tokens={size}",
                emulation={"page_tokens": size},
                work_bound=2 / service,
            )
        )
    return made


def test_the_ranking_over_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    made = runs()
    assert pages(served_cells(made)) == [1, 16]
    (path,) = FIGURES["5-sensitivity"](made, tmp_path)
    assert path.name == "figure5-sensitivity.svg"
    text = path.read_text()
    for part in ("EMULATED", "2K shared, 8 QPS", "tokens of a page", "CacheBlend 1.", "KVCMAS 2."):
        assert part in text
    assert "page_tokens" not in text


@pytest.mark.parametrize("kind", ["one size", "real"])
def test_what_is_missing_is_said(kind: str, tmp_path: Path) -> None:
    made = runs()[:3] if kind == "one size" else [served_run("kvcmas", 1.0)]
    with pytest.raises(ResultsError, match="two sizes of a page; made by: repro serve"):
        FIGURES["5-sensitivity"](made, tmp_path)
