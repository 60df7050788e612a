"""Where an engine's time goes: seconds that add up, beside the work bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.records import Run
from results.tables import build_table
from tests.served import served_run

PARTS = {"plan": 0.2, "execute": 0.3, "inject": 0.1, "again": 0.05, "build": 0.02, "capture": 9.0}


def busy(run: Run, seconds: float, **times: float) -> Run:
    """The same requests, one after another, each of them this long."""
    rows = [
        row.model_copy(
            update={
                "arrival_s": 0.0,
                "started_s": seconds * n,
                "finished_s": seconds * (n + 1),
                "times_s": times,
            }
        )
        for n, row in enumerate(run.requests)
    ]
    return replace(run, requests=tuple(rows))


def test_the_parts_of_a_request_add_up_to_the_engines_seconds() -> None:
    dense, own = (served_run(name, 1.0) for name in ("nonshared", "kvcmas"))
    frame = build_table("7-time", [busy(dense, 2.0), busy(own, 1.6, **PARTS)]).frame
    rows = frame.set_index("method")
    assert rows.loc["NonShared", ["request_s", "engine_s", "speedup"]].tolist() == [2.0, 2.0, 1.0]
    kvcmas = rows.loc["KVCMAS"]
    assert kvcmas["request_s"] == pytest.approx(1.6)
    assert kvcmas["speedup"] == pytest.approx(1.25)
    assert kvcmas["reached_percent"] == pytest.approx(100 * 1.25 / 1.5)
    assert kvcmas["ideal_s"] == pytest.approx(2.0 / 1.5)
    parts = ["plan_s", "inject_s", "execute_s", "build_s", "engine_s"]
    assert kvcmas[parts].tolist() == pytest.approx([0.2, 0.1, 0.25, 0.02, 1.03])
    assert kvcmas[parts].sum() == pytest.approx(kvcmas["request_s"])


def test_an_engine_that_waits_for_requests_is_left_out() -> None:
    runs = [served_run(name, 1.0, qps=1.0) for name in ("nonshared", "kvcmas")]
    assert not len(build_table("7-time", runs).frame)
    assert not len(build_table("7-time", [served_run("kvcmas", 1.0)]).frame), "nothing beside it"
