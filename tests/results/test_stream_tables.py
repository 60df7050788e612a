"""Tables 11 to 15 from synthetic single streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from results.errors import TableError
from results.records import Run, RunWriter, read_run
from results.stats import ratio_of_sums
from results.stream import StreamCell, stream_cells
from results.tables import build_table
from tests.results.conftest import FidelityFactory
from tests.streamed import stream_run


def methods() -> list[Run]:
    return [
        stream_run("nonshared", 1.0),
        stream_run("fullshared", 0.2),
        stream_run("cacheblend", 0.5),
        stream_run("kvcomm", 1.0, out_of_memory=True, memory_needed_bytes=10**10),
        stream_run("kvcmas", 0.25, pool=3 * 10**8),
    ]


def test_reuse_requests_are_all_but_the_first() -> None:
    frame = build_table("12", methods()).frame.set_index("method")
    own = frame.loc["KVCMAS"]
    assert own["n"] == 12
    assert own["ttft_s"] == pytest.approx(0.25, rel=0.03)
    assert own["speedup"] == pytest.approx(4, rel=0.05)
    assert own["speedup_low"] < own["speedup"] < own["speedup_high"]
    # 3 x (10 + 4) tokens in 2 + 2 x 1.25 seconds.
    assert own["tokens_per_s"] == pytest.approx(42 / 4.5, rel=0.02)
    assert own["generated_per_s"] == pytest.approx(12 / 4.5, rel=0.02)
    assert (own["rho_set"], own["rho_entry"]) == (0.8, 0.5)
    # A tenth of a second of computing and half a second of moving per second.
    shares = own[["flop_share", "byte_share", "roofline_share"]]
    assert list(shares) == pytest.approx([0.1, 0.5, 0.5])
    assert pd.isna(frame.loc["NonShared", "rho_set"])
    assert frame.loc["KVComm", "state"] == "OOM" and frame.loc["KVComm", "n"] == 0


def test_memory_by_category_and_what_was_not_run() -> None:
    table = build_table("11", methods())
    assert not any("incomplete" in line for line in table.footer)  # out of memory is a result
    frame = table.frame.set_index("method")
    assert frame.loc["KVCMAS", "held_bytes"] == 15 * 10**8
    assert frame.loc["NonShared", "held_ratio"] == pytest.approx(12 / 15)
    assert frame.loc["KVCMAS", "pool_delta_bytes"] == 3 * 10**8
    # Where nothing was run both are taken as calculated.
    assert frame.loc["KVComm", "held_ratio"] == pytest.approx(10)
    assert {"allocated_bytes", "reserved_bytes"}.isdisjoint(c.name for c in table.shown())
    for text in (table.to_markdown(), table.to_latex()):
        assert "OOM" in text and "Single stream, layout T" in text
    assert "15 agent requests ran before and were discarded" in table.to_markdown()


def test_ablations_stay_out_of_the_comparison() -> None:
    runs = [*methods(), stream_run("kvcmas", 0.3, label="capacity=2 rho=0.8")]
    assert len(build_table("12", runs).frame) == 5
    alone = [stream_run("kvcmas", 0.3, label="capacity=2 rho=0.8", settings={"capacity": 2})]
    table = build_table("12", alone)
    assert table.frame.empty and "made by: repro stream" in table.footer[0]


def test_agents_and_rounds_average_over_all_requests() -> None:
    runs = [
        stream_run(name, ttft, agents=n)
        for n in (2, 4)
        for name, ttft in (("nonshared", 1.0), ("kvcmas", 0.25))
    ]
    frame = build_table("14", runs).frame
    assert list(frame["agents"]) == [2, 2, 4, 4]
    own = frame[(frame["method"] == "KVCMAS") & (frame["agents"] == 4)].iloc[0]
    assert own["n"] == 24 and own["ttft_s"] == pytest.approx((1 + 3 * 0.25) / 4, rel=0.03)
    assert build_table("15", runs).frame.empty
    rounds = [stream_run("kvcmas", 0.25, rounds=r) for r in (1, 2)]
    assert list(build_table("15", rounds).frame["rounds"]) == [1, 2]


def pool(size: int, ttft: float) -> Run:
    label = "rho=0.8" if size == 10 else f"capacity={size} rho=0.8"
    return stream_run("kvcmas", ttft, label=label, settings={"capacity": size}, pool=size * 10**7)


def test_quality_joins_by_variant_whatever_the_model(
    make_fidelity: FidelityFactory,
    make_fidelity_edge: Callable[..., dict[str, Any]],
    make_replay: Callable[..., Run],
) -> None:
    edge = make_fidelity_edge(k=0.1, v=0.2)
    turns = tuple(make_fidelity(i, edges=(edge,), kl=(0.25,)) for i in range(2))
    # The order of a label's parts does not matter.
    other = make_replay(turns, method="kvcmas", label="rho=0.8 capacity=2")
    runs = [stream_run("nonshared", 1.0), pool(20, 0.5), pool(2, 0.3), other]
    table = build_table("13", runs)
    assert list(table.frame["capacity"].fillna(0)) == [0, 2, 20]
    assert list(table.frame["kl_first_nats"].fillna(-1)) == [-1, 0.25, -1]
    assert list(table.frame["v_error"].fillna(-1)) == pytest.approx([-1, 0.2, -1])
    assert any("gsm8k (fidelity): tiny-llama" in line for line in table.footer)
    assert table.frame["pool_bytes"].max() == 20 * 10**7
    assert build_table("13", [pool(2, 0.3)]).frame.empty  # one size tells nothing


def test_different_prompts_are_refused() -> None:
    a, b = stream_run("nonshared", 1.0), stream_run("kvcmas", 0.25)
    swapped = [row.model_copy(update={"prompt_sha256": "0" * 64}) for row in b.streamed]
    with pytest.raises(TableError, match="different prompts"):
        stream_cells([a, Run(b.info, (), b.samples, streamed=tuple(swapped))])
    with pytest.raises(TableError, match="both measure"):
        stream_cells([a, a])


def test_rows_are_what_was_written(tmp_path: Path) -> None:
    run = stream_run("kvcmas", 0.25, workflows=1)
    RunWriter(tmp_path, run.info).append_sample(run.streamed, run.samples[0])
    again = read_run(tmp_path)
    assert again.streamed == run.streamed and again.info == run.info


def test_shares_of_a_cell_that_was_not_run_are_unknown() -> None:
    cell = StreamCell(stream_run("kvcomm", 1.0, out_of_memory=True, rates=None))
    assert all(share != share for share in cell.shares())
    assert cell.held_bytes is None


def test_ratio_of_sums() -> None:
    assert ratio_of_sums([2.0, 4.0], [1.0, 2.0], seed=0) == (2, 2, 2)
    value, low, high = ratio_of_sums([1.0, 5.0], [1.0, 1.0], seed=0)
    assert (value, low, high) == (3, 1, 5)
    assert ratio_of_sums([3.0], [2.0], seed=0)[0] == 1.5
    with pytest.raises(ValueError, match="paired"):
        ratio_of_sums([1.0], [], seed=0)
