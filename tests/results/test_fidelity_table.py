"""The fidelity table recomputed by hand from synthetic replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from results.errors import TableError
from results.records import FidelityRecord, Run
from results.tables import build_table

TURNS = ((1, 1), (1, 2), (2, 1), (2, 2))  # sample, position of the four turns with reuse


@pytest.fixture
def constant(make_fidelity, make_fidelity_edge) -> Callable[..., tuple[FidelityRecord, ...]]:
    """The four turns of a method that does the same on all of them but for KL and TTFT."""

    def make(kls: tuple[float, ...], ttft_s: float = 0.5) -> tuple[FidelityRecord, ...]:
        return tuple(
            make_fidelity(
                sample,
                (make_fidelity_edge(0.5, 0.5, action="reuse"),),
                (kl,),
                turn_index=position,
                last=position == 2,
                ttft_s=ttft_s,
            )
            for (sample, position), kl in zip(TURNS, kls, strict=True)
        )

    return make


@pytest.fixture
def replayed(make_fidelity, make_fidelity_edge, make_replay) -> Run:
    """A warm-up sample and two of three turns: dense, corrected, and corrected or refused."""
    first = make_fidelity_edge(8.0, 8.0, source=None, first=True, action="dense", executed=20)
    empty = make_fidelity_edge(tokens=0, slot="out0", action="reuse")
    turns = (
        make_fidelity(
            0,
            (make_fidelity_edge(9.0, 9.0),),
            (9.0, 9.0),
            warm=True,
            last=True,
            reference_tokens=900,
            pool_bytes=9_000_000,
            reference_bytes=9_000_000,
        ),
        make_fidelity(1, (first,), (8.0,), turn_index=0, reference_tokens=7, touched_rows=99),
        make_fidelity(
            1,
            (make_fidelity_edge((0.0, 0.1, 0.2, 0.3), 0.2),),
            (0.1, 0.3),
            turn_index=1,
            answer_agree=(True, False),
            ttft_s=0.2,
            touched_rows=4,
            executed_flops=1_000_000_000,
            pool_bytes=3_000_000,
        ),
        make_fidelity(
            1,
            (
                make_fidelity_edge(0.1, 0.1),
                make_fidelity_edge(0.05, 0.03, slot="out1", tokens=3, executed=12, action="dense"),
            ),
            (0.2, 0.2),
            turn_index=2,
            last=True,
            ttft_s=0.4,
            touched_rows=6,
            executed_flops=2_000_000_000,
        ),
        make_fidelity(2, (first, empty), (8.0,), turn_index=0, reference_tokens=3),
        make_fidelity(
            2,
            (make_fidelity_edge(0.3, 0.4), empty),
            (0.5,),
            turn_index=1,
            answer_agree=(False,),
            ttft_s=0.3,
            touched_rows=8,
            executed_flops=3_000_000_000,
            row_layers=28,
        ),
        make_fidelity(
            2,
            (make_fidelity_edge(action="dense", executed=20),),
            (0.1, 0.1),
            turn_index=2,
            last=True,
            ttft_s=0.5,
            touched_rows=10,
            executed_flops=6_000_000_000,
            reference_bytes=500_000,
        ),
    )
    return make_replay(turns, method="kvcmas")


def test_every_column_by_hand(replayed: Run, make_replay, constant) -> None:
    exact = make_replay(constant((0.0,) * 4), method="nonshared")
    uncorrected = make_replay(constant((0.4, 0.6, 0.8, 1.0)), method="fullshared")
    table = build_table("fidelity", [uncorrected, replayed, exact])
    assert table.frame["method"].tolist() == ["NonShared", "FullShared", "KVCMAS"]
    # With two samples the 95% bounds are the means of the one and of the other.
    intervals = {
        "kl_first_nats": (0.9 / 4, 0.15, 0.3),
        "kl_first_difference_nats": (-1.9 / 4, -0.6, -0.35),
        "kl_last_nats": (0.15, 0.1, 0.2),
        "kl_last_difference_nats": (-0.65, -0.9, -0.4),
        "kl_answer_nats": (1.5 / 7, 0.8 / 4, 0.7 / 3),
        "agreement_percent": (500 / 7, 200 / 3, 75),
        "k_error": (0.6 / 5, 0.1, 0.15),
        "v_error": (0.73 / 5, 0.11, 0.2),
        "kl_accepted_nats": (0.3, 0.1, 0.5),
        "kl_refused_nats": (0.15, 0.1, 0.2),
        "k_error_accepted": (0.55 / 3, 0.125, 0.3),
        "v_error_accepted": (0.7 / 3, 0.15, 0.4),
        "k_error_refused": (0.025, 0.0, 0.05),
        "v_error_refused": (0.015, 0.0, 0.03),
    }
    expected = {
        "n": 2,
        "runs": 1,
        "n_warm": 1,
        "n_turns": 4,
        "rho_entry": 1 - 32 / 92,
        "rho_transition": 3 / 5,
        "rho_call": 1 / 2,
        "n_paired": 4,
        "n_accepted": 2,
        "n_refused": 2,
        "touched_rows": 7,
        "row_layers": (20 + 20 + 28 + 40) / 4,
        "row_layers_accepted": (20 + 28) / 2,
        "executed_flops": 3e9,
        "reference_tokens": 5,
        "ttft_s": 0.35,
        "ttft_ratio": 0.7,
        "pool_bytes": 3_000_000,
        "reference_bytes": 500_000,
    }
    for name, (value, low, high) in intervals.items():
        expected |= {name: value, f"{name}_low": low, f"{name}_high": high}
    row = table.frame.iloc[2]
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
    assert set(expected) | {"bench", "method", "variant", "pool_state"} == set(table.frame)


def test_displayed_cells_and_footer(replayed: Run) -> None:
    table = build_table("fidelity", [replayed])
    names = ["kl_first_nats", "executed_flops", "pool_bytes", "kl_first_difference_nats"]
    assert table.display_rows(names) == [["0.2250 [0.1500, 0.3000]", "3.00", "3.00", ""]]
    assert "teacher-forced on NonShared's ids; T: at most 2 answer tokens per turn" in table.footer
    assert "Variant" not in table.headings()
    assert table.to_markdown().startswith("**Table fidelity: Fidelity on recorded trajectories**")


def test_without_its_peers_a_row_compares_with_nobody(replayed: Run) -> None:
    row = build_table("fidelity", [replayed]).frame.iloc[0]
    compared = ["kl_first_difference_nats", "kl_last_difference_nats", "n_paired", "ttft_ratio"]
    assert row[compared].isna().all()


def test_a_peer_differs_from_itself_in_nothing(make_replay, constant) -> None:
    runs = [
        make_replay(constant((kl,) * 4, ttft), method=method)
        for method, kl, ttft in (("nonshared", 0.0, 0.8), ("fullshared", 0.4, 0.2))
    ]
    frame = build_table("fidelity", runs).frame
    assert frame["ttft_ratio"].tolist() == pytest.approx([1.0, 0.25])
    assert frame["kl_first_difference_nats"].isna().tolist() == [False, True]
    assert frame["kl_first_difference_nats"].iloc[0] == pytest.approx(-0.4)


def test_differences_use_the_turns_both_replayed(make_replay, constant) -> None:
    whole = make_replay(constant((0.1, 0.2, 0.3, 0.4)), method="kvcmas")
    part = make_replay(constant((0.5, 0.5, 9.0, 9.0))[:2], method="fullshared")
    row = build_table("fidelity", [whole, part]).frame.iloc[1]
    assert row["n_paired"] == 2
    assert row["kl_first_difference_nats"] == pytest.approx(-0.35)
    assert row.isna()["kl_first_difference_nats_low"]  # one sample says nothing about its spread


def test_peers_are_those_with_default_settings_of_any_pool_state(make_replay, constant) -> None:
    runs = [
        make_replay(constant((0.1,) * 4), method="kvcmas", pool_state="cold"),
        make_replay(constant((0.05,) * 4), method="kvcmas", pool_state="warm"),
        make_replay(constant((0.5,) * 4), method="fullshared"),
        make_replay(constant((9.0,) * 4), method="fullshared", label="pf_policy=rotate"),
    ]
    table = build_table("fidelity", runs)
    names = ["method", "variant", "pool_state"]
    assert table.display_rows(names) == [
        ["FullShared", "", "cold"],
        ["FullShared", "pf_policy=rotate", "cold"],
        ["KVCMAS", "", "cold"],
        ["KVCMAS", "", "warm"],
    ]
    differences = table.frame["kl_first_difference_nats"].tolist()[1:]
    assert differences == pytest.approx([8.5, -0.4, -0.45])


def test_repetitions_are_averaged_and_do_not_narrow_the_interval(make_replay, constant) -> None:
    kls = (0.1, 0.2, 0.3, 0.6)
    uncorrected = make_replay(constant((1.0,) * 4), method="fullshared")
    once = build_table("fidelity", [make_replay(constant(kls)), uncorrected]).frame.iloc[1]
    runs = [make_replay(constant(kls), seed=seed) for seed in range(3)]
    three = build_table("fidelity", [*runs, uncorrected]).frame.iloc[1]
    assert (once["runs"], three["runs"], three["n"], three["n_turns"]) == (1, 3, 2, 12)
    same = ["reference_tokens", "touched_rows", "n_paired"]
    for name in ("kl_first_nats", "kl_first_difference_nats", "k_error"):
        same += [name, f"{name}_low", f"{name}_high"]
    for name in same:
        assert three[name] == pytest.approx(once[name])


def test_a_warm_up_turn_need_not_be_measured(
    make_fidelity, make_fidelity_edge, make_replay
) -> None:
    unmeasured = make_fidelity(0, (make_fidelity_edge((), ()),), (), warm=True)
    evaluated = make_fidelity(1, (make_fidelity_edge(0.1, 0.2),), (0.3,))
    row = build_table("fidelity", [make_replay((unmeasured, evaluated))]).frame.iloc[0]
    assert (row["n"], row["n_warm"], row["n_turns"]) == (1, 1, 1)
    assert (row["k_error"], row["v_error"], row["kl_first_nats"]) == pytest.approx((0.1, 0.2, 0.3))


def test_a_turn_without_a_token_has_errors_but_no_kl(
    make_fidelity, make_fidelity_edge, make_replay
) -> None:
    turn = make_fidelity(0, (make_fidelity_edge(0.1, 0.2),), (), ttft_s=None, last=True)
    row = build_table("fidelity", [make_replay((turn,))]).frame.iloc[0]
    assert (row["n_turns"], row["k_error"]) == (1, pytest.approx(0.1))
    assert row[["kl_first_nats", "kl_last_nats", "kl_answer_nats", "ttft_s"]].isna().all()


def test_a_run_without_samples_yet_has_empty_cells(make_replay) -> None:
    table = build_table("fidelity", [make_replay(n=4)])
    row = table.frame.iloc[0]
    counts = ["n", "n_warm", "n_turns", "n_accepted", "n_refused"]
    assert (row[counts] == 0).all()
    named = ["bench", "method", "variant", "pool_state", "runs"]
    assert row.drop([*counts, *named]).isna().all()


def test_runs_of_other_kinds_are_left_out(make_run) -> None:
    table = build_table("fidelity", [make_run()])
    assert table.footer == ("no records yet; made by: repro fidelity --trace FILE",)
    assert table.display_rows() == []


def test_different_prompts_as_the_same_turn_are_refused(make_replay, make_fidelity) -> None:
    runs = [
        make_replay((make_fidelity(0, prompt_sha256=digit * 64),), method=method)
        for digit, method in (("1", "nonshared"), ("2", "kvcmas"))
    ]
    with pytest.raises(TableError, match="replayed different prompts as turn 1 of sample s0"):
        build_table("fidelity", runs)


def test_runs_that_are_not_repetitions_are_refused(make_replay, constant) -> None:
    runs = [make_replay(constant((0.1,) * 4), profile=profile) for profile in ("smoke", "cpu")]
    with pytest.raises(TableError, match="both measure kvcmas on gsm8k with seed 0"):
        build_table("fidelity", runs)
