"""The cost of one reuse turn, paired with NonShared's on the same request."""

from __future__ import annotations

import pandas as pd
import pytest

from results.tables import build_table


@pytest.fixture
def cell(make_replay, make_fidelity, make_fidelity_edge):
    """A run of one warm-up request and two timed ones."""

    def make(method: str, ttfts: tuple[float, float], **turn: object):
        edge = make_fidelity_edge(executed=20 if method == "nonshared" else 0)
        turns = [
            make_fidelity(
                index,
                (edge,),
                warm=index == 0,
                ttft_s=ttft,
                times_s={"plan": ttft / 4, "build": 3.0 if index == 0 else 0.0},
                **turn,
            )
            for index, ttft in enumerate((9.0, *ttfts))
        ]
        return make_replay(tuple(turns), method=method, label="", kind="fidelity-timing")

    return make


def test_ratios_are_paired_by_request(cell) -> None:
    runs = [
        cell("nonshared", (1.0, 2.0), row_layers=40, pool_entries=0),
        cell("kvcmas", (0.5, 0.5), row_layers=20, executed_flops=250, pool_entries=1),
    ]
    frame = build_table("ttft", runs).frame.set_index("method")
    row = frame.loc["KVCMAS"]
    assert row["n"] == 2
    assert row["ttft_ratio"] == pytest.approx((0.5 + 0.25) / 2)
    assert row["plan_share"] == pytest.approx(0.25)
    assert row["row_layers_ratio"] == pytest.approx(0.5)
    assert row["flops_ratio"] == pytest.approx(0.25)
    assert row["build_ratio"] == pytest.approx(3.0 / 1.5)
    assert frame.loc["NonShared", "ttft_ratio"] == 1
    assert pd.isna(frame.loc["NonShared", "build_ratio"])


def test_without_nonshared_there_is_no_ratio(cell) -> None:
    row = build_table("ttft", [cell("kvcmas", (0.5, 0.5), row_layers=20)]).frame.iloc[0]
    assert pd.isna(row["ttft_ratio"])
    assert pd.isna(row["row_layers_ratio"])
