"""Tables 3 to 6 and 8 from synthetic runs: what every row stands for, and what stays empty."""

from __future__ import annotations

import pytest

from results.records import Run
from results.tables import build_table


def test_table3_shows_thresholds_of_gated_methods_and_the_reuse_they_held(
    make_run, make_turn, make_edge
) -> None:
    turns = (make_turn(0, edges=(make_edge(5),)), make_turn(1, edges=(make_edge(5, executed=20),)))
    runs = [
        make_run(bench="gsm8k", method="nonshared", agents=("One", "Two")),
        make_run(
            turns=turns,
            bench="gsm8k",
            settings={"tau": 0.05, "chained": True},
            label="rho=0.8",
            target_rho=0.8,
            agents=("One", "Two"),
        ),
        make_run(bench="gsm8k", settings={"tau": 0.3}, label="accept all"),
        make_run(bench="mmlu", method="nonshared"),
        make_run(bench="mmlu", method="fullshared"),
    ]
    table = build_table("3", runs)
    assert table.display_rows() == [
        ["mmlu", "", "sequential", "2", "", "", "", "0.29", "", "", "", "", ""],
        ["gsm8k", "One, Two", "sequential", "2", "KVCMAS", "rho=0.8", "0.0500", "0.32", "0.80",
         "0.500", "1.00", "0.00", "0.0"],
    ]  # fmt: skip
    assert "not measured: HumanEval, MathVista, Video-MME" in table.footer[-1]
    assert "repro accuracy --bench BENCH" in table.footer[-1]


def test_table3_tells_how_reuse_changes_and_what_no_gate_was_asked_about(
    make_run, make_turn, make_edge
) -> None:
    judged, refused = make_edge(5), make_edge(5, executed=20)
    alone = refused | {"action": "dense", "reason": "length", "entropy": None}
    first = alone | {"first": True}
    edges = [(alone, first), (judged, refused), (judged,), (judged, judged, alone)]
    turns = tuple(make_turn(i, edges=of, tokens=15) for i, of in enumerate(edges))
    row = build_table("3", [make_run((True,) * 4, turns, bench="mmlu")]).frame.iloc[0]
    assert [row[f"rho_quarter_{i}"] for i in (1, 2, 3, 4)] == pytest.approx([0, 0.5, 1, 2 / 3])
    assert row["rho_entry"] == pytest.approx(4 / 7)
    assert row["unjudged_percent"] == pytest.approx(100 * 2 / 7)


def test_table4_tells_what_accumulates_from_what_is_processed(make_run, make_turn) -> None:
    turns = (
        make_turn(0, tokens=10, output_tokens=3),
        make_turn(0, tokens=20, output_tokens=4),
        make_turn(1, tokens=40, output_tokens=2),
    )
    row = build_table("4", [make_run((True, True), turns, method="nonshared")]).frame.iloc[0]
    assert (row["mean_tokens"], row["max_tokens"]) == ((24 + 42) / 2, 42)
    assert (row["mean_processed"], row["max_processed"]) == ((37 + 42) / 2, 42)


def test_table5_needs_several_complete_orders(make_run) -> None:
    runs = [
        make_run((True, False), seed=0),
        make_run((True, True), seed=1),
        make_run((False,), n=2, seed=2),  # interrupted
        make_run((True, False), method="fullshared"),
    ]
    rows = build_table("5", runs).display_rows()
    assert rows == [
        ["gsm8k", "FullShared", "2", "1", "50.0", "", "does not matter"],
        ["gsm8k", "KVCMAS", "2", "2", "75.0", "35.36", "matters"],
    ]
    assert any("--orders 3" in line for line in build_table("5", runs).footer)


@pytest.fixture
def sweep(make_run, make_turn, make_edge) -> list[Run]:
    """Three thresholds; the middle one was calibrated."""

    def run(tau: float, executed: int, correct: tuple[bool, ...], **info: object) -> Run:
        turns = tuple(make_turn(i, edges=(make_edge(5, executed=executed),)) for i in range(2))
        settings = {"tau": tau, "chained": True}
        return make_run(correct, turns, bench="mmlu", settings=settings, **info)

    return [
        make_run((True, True), bench="mmlu", method="nonshared"),
        run(0.9, 0, (False, False), label="tau=0.9"),
        run(0.29, 20, (True, True), label="tau=0.29"),
        run(0.5, 10, (True, False), label="rho=0.5", target_rho=0.5),
        make_run(bench="mmlu", settings={"tau": 0.3, "chained": False}, label="chained=False"),
        make_run(bench="mmlu", settings={"tau": 0.3, "chained": True}, label="accept all"),
    ]


def test_table6_is_the_curve_of_the_threshold(sweep: list[Run]) -> None:
    table = build_table("6", sweep)
    names = ["tau", "main", "rho_entry", "difference_points"]
    assert table.display_rows(names) == [
        ["0.2900", "paper", "0.000", "0.0 [0.0, 0.0]"],
        ["0.5000", "calibrated", "0.500", "-50.0 [-100.0, 0.0]"],
        ["0.9000", "", "1.000", "-100.0 [-100.0, -100.0]"],
    ]
    assert "Video-MME" in table.footer[-1] and "--study threshold" in table.footer[-1]


def test_table8_pairs_chained_and_non_chained_runs_of_one_reuse_ratio(make_run) -> None:
    def run(chained: bool, correct: tuple[bool, ...], bench: str = "mmlu", **info: object) -> Run:
        label = "rho=0.8" if chained else "chained=False rho=0.8"
        values = {"label": label, "target_rho": 0.8, **info}
        settings = {"tau": 0.1 if chained else 0.2, "chained": chained}
        return make_run(correct, bench=bench, settings=settings, **values)

    runs = [
        run(True, (True, True, True, False)),
        run(False, (True, False, False, False)),
        run(True, (True,) * 4, bench="videomme"),
        run(True, (False,) * 4, label="tau=0.1", target_rho=None),
    ]
    table = build_table("8", runs)
    names = ["bench", "correction", "tau", "accuracy_percent", "chained_points", "n_paired"]
    first, second = table.display_rows(names)
    assert first[:3] == ["mmlu", "non-chained", "0.2000"] and first[4:] == ["", ""]
    assert second[:3] == ["mmlu", "chained", "0.1000"]
    assert second[4].startswith("50.0 [") and second[5] == "4"
    assert any("non-chained not measured: Video-MME" in line for line in table.footer)


@pytest.mark.parametrize("number", ["1", "3", "4", "5", "6", "8"])
def test_a_table_without_runs_is_empty_and_names_its_command(number: str) -> None:
    table = build_table(number, [])
    assert table.frame.empty
    assert "no records yet; made by: repro accuracy --bench" in table.footer[0]
