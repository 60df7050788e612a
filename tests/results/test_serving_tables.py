"""Tables 7, 9 and 10, and the grouping behind them."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from results.errors import TableError
from results.records import LostRequest
from results.serving import ratio, served_cells, speed_up
from results.tables import build_table
from tests.served import request, serve_info, served_run, sha


def lost(run_key: str, turn: int) -> LostRequest:
    return LostRequest(
        run_key=run_key,
        sample_id="w0",
        sample_index=0,
        node=f"A{turn}",
        turn_index=turn,
        prompt_sha256=sha(f"T 2048+128 0 {turn}"),
        arrival_s=None,
        state="unfinished",
        reason="limit of 5 s",
    )


def row(frame: pd.DataFrame, **where: object) -> pd.Series:
    for column, value in where.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_a_speed_up_is_over_nonshared_under_the_same_load_and_beside_its_bound() -> None:
    runs = [
        served_run(method, service, qps=qps)
        for qps in (0.0, 8.0)
        for method, service in (("nonshared", 2.0), ("kvcmas", 1.0))
    ]
    frame = build_table("7", runs).frame
    single = row(frame, method="KVCMAS", qps=0.0)
    assert single["speedup_p50"] == pytest.approx(2.0)
    assert single["work_bound"] == 1.5
    assert row(frame, method="NonShared", qps=8.0)["speedup_p50"] == 1.0
    assert row(frame, method="KVCMAS", qps=8.0)["load"] == pytest.approx(8 / 0.5 / 2.0)
    assert pd.isna(single["load"]), "a single stream has no rate"


def test_a_tail_of_few_requests_is_not_shown() -> None:
    few = build_table("7", [served_run("kvcmas", 1.0, workflows=9)]).frame
    enough = build_table("7", [served_run("kvcmas", 1.0, workflows=10)]).frame
    assert pd.isna(few.loc[0, "ttft_p90_s"]) and not pd.isna(few.loc[0, "ttft_p50_s"])
    assert not pd.isna(enough.loc[0, "ttft_p90_s"])


def test_lost_requests_are_counted_and_pair_with_nothing() -> None:
    dense = served_run("nonshared", 2.0)
    whole = served_run("kvcmas", 1.0)
    partly = served_run("kvcmas", 1.0, lost=(lost(whole.info.run_key, 1),))
    found = row(build_table("7", [dense, partly]).frame, method="KVCMAS")
    assert (found["n"], found["lost"]) == (39, 1)
    cells = served_cells([dense, partly])
    assert ("w0", 1) not in {key[1:] for key in cells[1].requests}
    assert not math.isnan(speed_up(cells[1], cells, 50).value)


def test_memory_that_is_not_there_is_said_so() -> None:
    run = served_run("kvcomm", 1.0, out_of_memory=True, memory_needed_bytes=435 * 10**9)
    table = build_table("7", [run])
    shown = dict(zip(table.headings(), table.display_rows()[0], strict=True))
    assert shown["Not run"] == "OOM"
    assert shown["Needs GB"] == "435.00"
    assert shown["p50 TTFT s [95% CI]"] == ""


def test_methods_without_a_ratio_stand_in_every_comparison() -> None:
    runs = [served_run("nonshared", 2.0)]
    runs += [served_run("kvcmas", 1.0, rho=rho, rho_method=rho) for rho in (0.8, 0.6)]
    runs += [served_run("cacheblend", 1.5, rho=0.8, rho_method=0.9)]
    frame = build_table("7", runs).frame
    assert frame["rho"].tolist() == ["0.8", "0.8 (0.9)", "0.8", "0.6", "0.6"]
    assert frame["method"].tolist() == [
        "NonShared",
        "CacheBlend",
        "KVCMAS",
        "NonShared",
        "KVCMAS",
    ]


def test_each_table_takes_its_own_cells() -> None:
    chained = served_run("kvcmas", 1.0)
    other = served_run("kvcmas", 1.5, label="chained=False", settings={"chained": False})
    long = served_run("kvcmas", 2.0, output_tokens=2048)
    runs = [chained, other, long]
    assert build_table("7", runs).frame["n"].tolist() == [40]
    assert build_table("9", runs).frame["variant"].tolist() == ["", "chained=False"]
    assert build_table("10", runs).frame["bench"].tolist() == ["T 2048+2048"]
    assert len(build_table("9", [chained]).frame) == 0
    assert build_table("10", [chained]).footer[0].startswith("no records yet; made by: repro serve")


def test_repeats_are_pooled_and_their_spread_shown() -> None:
    runs = [served_run("kvcmas", 1.0, seed=seed) for seed in (0, 1, 2)]
    found = build_table("7", runs).frame.iloc[0]
    assert (found["n"], found["runs"]) == (120, 3)
    assert found["p50_run_low_s"] < found["ttft_p50_s"] < found["p50_run_high_s"]


def test_the_header_says_what_a_number_means() -> None:
    text = " ".join(build_table("7", [served_run("kvcmas", 1.0, scale=8.0)]).header)
    for part in (
        "real",
        "layout T",
        "divided by 8.0",
        "n = 40",
        "arrivals even",
        "virtual clock",
        "transformers on tiny-llama",
        "controlled",
        "agent requests per second",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"clock": "wall"}, "even, wall clock"),
        ({"decode": True}, "even, decoded"),
        ({"rho_kind": "gate", "rho_method": None}, "even, live gate"),
        ({"arrival": "workflow"}, "workflow"),
    ],
)
def test_other_loads_are_labelled_and_never_paired(change: dict[str, object], shown: str) -> None:
    runs = [served_run("nonshared", 2.0), served_run("kvcmas", 1.0, **change)]
    found = row(build_table("7", runs).frame, method="KVCMAS")
    assert found["arrival"] == shown
    if "rho_kind" not in change:
        assert pd.isna(found["speedup_p50"])


def test_decoding_has_gaps_rates_and_goodput() -> None:
    run = served_run("kvcmas", 1.0, decode=True, slo_ttft_s=5.0, slo_inter_token_s=0.2)
    slow = [
        row.model_copy(update={"inter_token_s": (0.1, 0.5 if row.turn_index == 0 else 0.1)})
        for row in run.requests
    ]
    found = build_table("7", [type(run)(run.info, (), run.samples, requests=tuple(slow))]).frame
    assert found.loc[0, "inter_token_p50_s"] == pytest.approx(0.1)
    assert found.loc[0, "tokens_per_s"] == pytest.approx(3 * found.loc[0, "served_per_s"])
    assert 0 < found.loc[0, "goodput_per_s"] < found.loc[0, "served_per_s"]


def test_runs_with_other_prompts_are_refused() -> None:
    one, two = served_run("nonshared", 2.0), served_run("kvcmas", 1.0)
    changed = request(two.info, 0, 0, prompt_sha256=sha("another prompt"))
    other = type(two)(two.info, (), two.samples, requests=(changed, *two.requests[1:]))
    with pytest.raises(TableError, match="served different prompts as turn 0 of w0"):
        build_table("7", [one, other])


def test_a_ratio_takes_the_same_requests_on_both_sides() -> None:
    dense, fast = served_run("nonshared", 2.0, qps=0.0), served_run("kvcmas", 1.0, qps=0.0)
    cut = type(fast)(fast.info, (), fast.samples, requests=fast.requests[:20])
    cells = served_cells([dense, cut])
    assert ratio(cells[0], cells[1], 50).value == pytest.approx(2.0)


def test_times_out_of_order_are_refused() -> None:
    info = served_run("kvcmas", 1.0).info
    with pytest.raises(ValueError, match="out of order"):
        request(info, 0, 0, started_s=2.0)
    late = {"arrival_s": 5.75, "released_s": 9.860423, "started_s": 9.860423, "ttft_s": 4.283142}
    request(info, 0, 0, **late, finished_s=10.03314)  # rounded to seven digits, as packed runs are
    with pytest.raises(ValueError, match="out of order"):
        request(info, 0, 0, **late, finished_s=10.03304)
    with pytest.raises(ValueError, match="says what it served"):
        info.model_validate(info.model_dump() | {"kind": "accuracy"})
    assert serve_info(qps=8.0, time_scale=2.0).qps_here == 4.0


def test_real_emulated_and_modelled_cells_never_share_a_table() -> None:
    emulated = {"mode": "emulated", "info": {"kind": "emulate"}}
    runs = [served_run("nonshared", 2.0), served_run("kvcmas", 1.0)]
    runs += [served_run("nonshared", 4.0, **emulated), served_run("kvcmas", 1.0, **emulated)]
    real, other = build_table("7", runs), build_table("7-emulated", runs)
    assert row(real.frame, method="KVCMAS")["speedup_p50"] == pytest.approx(2.0, rel=0.1)
    assert row(other.frame, method="KVCMAS")["speedup_p50"] == pytest.approx(4.0, rel=0.1)
    assert "EMULATED" in other.spec.title and other.footer[0].startswith("EMULATED")
    assert other.header[0].startswith("emulated") and real.header[0].startswith("real")
    assert not len(build_table("7-modelled", runs).frame)
    with pytest.raises(TableError, match="emulated and real cells are never put together"):
        served_cells(runs)
    with pytest.raises(ValueError, match="says what it served"):
        served_run("kvcmas", 1.0, mode="emulated")
