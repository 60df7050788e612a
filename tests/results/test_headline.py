"""C01 to C05 from three kinds of cells, each in a table of its own."""

from __future__ import annotations

from typing import Any

import pytest

from results.records import Run
from results.tables import build_table
from tests.served import served_run


def cell(kind: str, method: str, service: float, **changes: Any) -> Run:
    modes = {"serve": "real", "emulate": "emulated", "model": "modelled"}
    trace = {"shared_tokens": 32_768, "qps": 8.0}
    info = {"kind": kind} | changes.pop("info", {})
    return served_run(method, service, mode=modes[kind], info=info, **trace | changes)


def cells(kind: str, gain: float, **changes: Any) -> list[Run]:
    return [
        cell(kind, "nonshared", gain, work_bound=1.0, **changes),
        cell(kind, "kvcmas", 1.0, work_bound=2.2, **changes),
    ]


def test_three_values_stand_in_three_tables() -> None:
    runs = [*cells("serve", 2.0), *cells("emulate", 3.0), *cells("model", 4.0)]
    for number, gain in (("headline", 2), ("headline-emulated", 3), ("headline-modelled", 4)):
        table = build_table(number, runs)
        frame = table.frame.set_index("claim")
        assert frame.index.tolist() == ["C01", "C02"]
        assert frame["paper"].tolist() == [2.0, 2.1]
        assert frame["value"].tolist() == pytest.approx([gain, gain], rel=0.1)
        assert frame["bound"].tolist() == pytest.approx([2.2, 2.2])
        assert frame.loc["C02", "quantity"] == "p90 NonShared/KVCMAS"
    assert "EMULATED" in build_table("headline-emulated", runs).spec.title


def test_rivals_come_with_both_first_turns() -> None:
    runs = cells("serve", 2.0)
    for turn, service in (("corrected", 2.0), ("dense", 1.5)):
        runs.append(cell("serve", "graphflow", service, label=turn, settings={"first_turn": turn}))
        settings = {"chained": False, "first_turn": turn}
        runs.append(cell("serve", "kvcmas", service, label=f"no {turn}", settings=settings))
    frame = build_table("headline", runs).frame
    assert frame["claim"].tolist() == ["C01", "C02"] + ["C03"] * 4 + ["C04"] * 4
    values = frame[frame["claim"] == "C04"]["value"].tolist()
    assert values == pytest.approx([0.5, 1 / 1.5, 0.5, 1 / 1.5], rel=0.1)


def test_emulated_rivals_have_one_first_turn_and_count_full_prefills() -> None:
    schedule = {"schedule": "even", "rho": 0.8, "full_prefills": 31, "requests": 68}
    runs = cells("emulate", 2.0, schedule=schedule)
    runs.append(cell("emulate", "graphflow", 1.4, schedule=schedule))
    runs[-1].info.settings.clear()
    frame = build_table("headline-emulated", runs).frame
    assert frame["claim"].tolist() == ["C01", "C02", "C03", "C03"]
    assert frame.loc[2, "full_prefills"] == "KVCMAS 31 of 68; GraphFlow 31 of 68"


def test_settings_are_kept_apart() -> None:
    runs = cells("serve", 2.0)
    runs += [
        cell("serve", method, service, work_bound=bound, info={"engine": "vllm"})
        for method, service, bound in (("nonshared", 3.0, 1.0), ("kvcmas", 1.0, 2.2))
    ]
    table = build_table("headline", runs)
    assert table.frame["value"].tolist() == pytest.approx([2, 2, 3, 3], rel=0.1)
    assert table.frame["setting"].nunique() == 2


def test_nothing_at_the_point_is_said() -> None:
    table = build_table("headline", [cell("serve", "kvcmas", 1.0, qps=2.0)])
    assert not len(table.frame) and "no records at the paper's serving point" in table.footer[0]
    assert build_table("headline-modelled", []).footer[0].startswith("no records yet; made by:")
