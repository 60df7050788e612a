"""Table 1 recomputed by hand from synthetic runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from results.errors import TableError
from results.records import Run
from results.tables import build_table


@pytest.fixture
def measured(make_run, make_turn, make_edge) -> Run:
    """Two samples of two turns: dense first, then corrected (sample 0) or refused (sample 1)."""
    first = make_edge(5, executed=20, action="dense", first=True, source=None)
    refused = make_edge(5, executed=20, action="dense")
    known = {"kl": 0.2, "agree": True}
    turns = (
        make_turn(0, edges=(first,), ttft_s=0.4, first_token={"kl": 0.0, "agree": True}),
        make_turn(0, edges=(make_edge(5),), ttft_s=0.2, first_token=known, pool_bytes=3_000_000),
        make_turn(1, edges=(first,), ttft_s=0.8, peak_memory_bytes=5_000_000_000),
        make_turn(1, edges=(refused,), ttft_s=None, output_tokens=0),
    )
    return make_run((True, False), turns, method="kvcmas")


def test_every_column_by_hand(measured: Run, make_run) -> None:
    table = build_table("1", [measured, make_run((True, True), method="nonshared")])
    assert table.frame["method"].tolist() == ["NonShared", "KVCMAS"]
    row = table.frame.iloc[1]
    expected = {
        "n": 2,
        "runs": 1,
        "accuracy_percent": 50.0,
        "accuracy_percent_low": 9.4531,  # Wilson, 1 of 2
        "accuracy_percent_high": 90.5469,
        "difference_points": -50.0,
        "difference_points_low": -100.0,
        "difference_points_high": 0.0,
        "n_paired": 2,
        "extraction_failures": 0,
        "unanswered_percent": 0.0,
        "latency_s": 2.0,
        "ttft_s": (0.3 + 0.8) / 2,  # per trajectory first; the turn without a token is left out
        "peak_memory_gb": 5.0,
        "pool_bytes": 3_000_000,
        "rho_entry": 0.5,  # 20 of 40 entries on edges that had a source
        "rho_transition": 0.5,
        "rho_call": 0.5,
        "rho_entry_with_first": 1 - 60 / 80,
        "executed_rows": (10 + 5 + 10 + 10) / 2,
        "kl_nats": 0.1,
        "agreement_percent": 100.0,
        "n_kl": 2,
    }
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected, abs=1e-3)


def test_what_was_left_out_or_unanswered_is_told(make_run) -> None:
    run = make_run((True, False, False, True), method="nonshared")
    silent = run.samples[1].model_copy(update={"failure": "no number", "extracted": None})
    info = run.info.model_copy(update={"missing": ("a (a.png)", "b (b.png)")})
    run = replace(run, info=info, samples=(run.samples[0], silent, *run.samples[2:]))
    table = build_table("1", [run])
    assert table.display_rows(["extraction_failures", "unanswered_percent"]) == [["1", "25.0"]]
    assert any("2 samples are left out" in note for note in table.footer)


def test_a_model_that_always_says_the_same_letter_is_told(make_run) -> None:
    def answered(letters: str, expected: str = "BACA") -> Run:
        run = make_run((True, False, False, True), method="nonshared")
        pairs = zip(run.samples, letters, expected, strict=True)
        samples = tuple(
            sample.model_copy(update={"extracted": said.strip() or None, "expected": right})
            for sample, said, right in pairs
        )
        return replace(run, samples=samples)

    for letters, percent in (("AAAA", "100.0"), ("AAB ", "66.7"), ("ABCD", "25.0")):
        table = build_table("1", [answered(letters)])
        assert table.display_rows(["commonest_percent"]) == [[percent]]
        assert any("commonest letter" in note for note in table.footer)
    numbers = build_table("1", [answered("AAAA", "17C3")])
    assert numbers.display_rows(["commonest_percent"]) == [[""]]
    assert not any("commonest letter" in note for note in numbers.footer)


def test_displayed_cells(make_run) -> None:
    table = build_table("1", [make_run((True,) * 5 + (False,) * 3, method="nonshared")])
    names = ["method", "accuracy_percent", "difference_points", "pool_bytes", "kl_nats", "n_kl"]
    assert table.display_rows(names) == [["NonShared", "62.5 [30.6, 86.3]", "", "1.50", "", ""]]


def test_methods_come_in_the_papers_order_then_by_name(make_run) -> None:
    names = ["zeta", "kvcmas", "alpha", "fullshared", "nonshared", "kvcomm", "droidspeak"]
    table = build_table("1", [make_run(method=name) for name in names])
    shown = ["NonShared", "FullShared", "DroidSpeak", "KVComm", "KVCMAS", "alpha", "zeta"]
    assert table.frame["method"].tolist() == shown


def test_a_variant_is_labelled_and_its_column_absent_otherwise(make_run) -> None:
    default = make_run()
    assert "Variant" not in build_table("1", [default]).headings()
    table = build_table("1", [make_run(label="r=8", settings={"rank": 8}), default])
    assert table.display_rows(["method", "variant"]) == [["KVCMAS", ""], ["KVCMAS", "r=8"]]


def test_repeating_the_questions_does_not_narrow_the_interval(make_run) -> None:
    answers = (True, False, True, True)
    once = build_table("1", [make_run(answers)]).frame.iloc[0]
    runs = [make_run(answers, seed=seed) for seed in range(3)]
    three = build_table("1", runs).frame.iloc[0]
    for name in ("n", "accuracy_percent", "accuracy_percent_low", "accuracy_percent_high"):
        assert three[name] == pytest.approx(once[name])
    assert (once["runs"], three["runs"]) == (1, 3)


def test_the_difference_uses_common_questions_only(make_run) -> None:
    table = build_table(
        "1",
        [
            make_run((False, False, True, True), method="nonshared"),
            make_run((True, False), method="kvcmas"),
        ],
    )
    row = table.frame.iloc[1]
    assert (row["n_paired"], row["difference_points"]) == (2, 50.0)


def test_unscored_answers_count_as_neither_right_nor_wrong(make_run) -> None:
    table = build_table("1", [make_run((True, None, None))])
    row = table.frame.iloc[0]
    assert (row["n"], row["accuracy_percent"]) == (3, 100.0)
    assert "2 answers were not scored and are not part of the accuracy" in table.footer


def test_a_run_without_samples_yet_has_empty_cells(make_run) -> None:
    row = build_table("1", [make_run((), n=4)]).frame.iloc[0]
    measured = row.drop(["bench", "data", "method", "variant", "pool_state", "n", "runs"])
    assert measured.isna().all()


def test_warm_and_cold_pools_are_separate_rows(make_run) -> None:
    table = build_table("1", [make_run(pool_state="warm"), make_run(pool_state="cold")])
    assert table.display_rows(["pool_state"]) == [["cold"], ["warm"]]


def test_runs_that_are_not_repetitions_are_refused(make_run) -> None:
    with pytest.raises(TableError, match="with seed 0; use one of them"):
        build_table("1", [make_run(), make_run(profile="cpu")])
    with pytest.raises(TableError, match="differ in their settings; give one a label"):
        build_table("1", [make_run(), make_run(seed=1, settings={"rank": 8})])


def test_p_values_are_adjusted_and_the_gap_stands_beside_raw_values(make_run) -> None:
    right = {"nonshared": 8, "fullshared": 2, "droidspeak": 5, "kvcmas": 7}
    runs = [make_run(tuple(i < n for i in range(8)), method=method) for method, n in right.items()]
    frame = build_table("1", runs).frame.set_index("method")
    assert frame["recovered_percent"].tolist() == pytest.approx([100, 0, 50, 100 * 5 / 6])
    # Six, three and one discordant pairs all in one direction: p = 2 / 2**n, times 3, 2 and 1.
    assert frame["p_holm"].tolist()[1:] == pytest.approx([3 * 2 / 64, 2 * 2 / 8, 1.0])
    assert frame["p_holm"].isna().tolist() == [True, False, False, False]


def test_without_a_gap_nothing_is_recovered(make_run) -> None:
    runs = [make_run((True, False), method=m) for m in ("nonshared", "fullshared", "kvcmas")]
    assert build_table("1", runs).frame["recovered_percent"].isna().all()
