"""Errors by edge and by layer, recomputed by hand."""

from __future__ import annotations

import pytest

from results.records import Run
from results.tables import build_table


@pytest.fixture
def replayed(make_fidelity, make_fidelity_edge, make_replay) -> Run:
    first = make_fidelity_edge(
        0.7, 0.8, source=None, target="A0", first=True, action="dense", executed=20
    )
    turns = [
        make_fidelity(0, (make_fidelity_edge(9.0, 9.0),), (9.0,), warm=True),
        # The later turn comes first: tables follow the workflow, not the file.
        make_fidelity(
            1,
            (
                make_fidelity_edge((0.0, 0.1, 0.2, 0.3), (0.0, 0.0, 0.2, 0.2)),
                make_fidelity_edge(0.5, 0.6, slot="out0", tokens=3, executed=12, action="dense"),
            ),
        ),
        make_fidelity(1, (first,), turn_index=0, node="A0"),
        make_fidelity(
            2,
            (
                make_fidelity_edge((0.0, 0.3, 0.4, 0.5), 0.4, tokens=3),
                make_fidelity_edge(slot="out0", tokens=0),
            ),
        ),
    ]
    return make_replay(tuple(turns), label="r=8")


def test_edges_by_hand(replayed: Run) -> None:
    table = build_table("fidelity-edges", [replayed])
    names = ["source", "target", "slot", "n", "accept_rate", "k_error", "v_error", "tokens"]
    assert table.display_rows(names) == [
        ["", "A0", "q", "1", "0.000", "0.7000", "0.8000", "5.0"],
        ["A0", "A1", "q", "2", "1.000", "0.2250", "0.2500", "4.0"],
        ["A0", "A1", "out0", "1", "0.000", "0.5000", "0.6000", "3.0"],
    ]
    assert table.display_rows(["bench", "method", "variant", "pool_state"])[0] == [
        "gsm8k",
        "KVCMAS",
        "r=8",
        "cold",
    ]


def test_layers_by_hand(replayed: Run) -> None:
    frame = build_table("fidelity-layers", [replayed]).frame
    assert frame["layer"].tolist() == [0, 1, 2, 3]
    assert frame["n"].tolist() == [3] * 4
    assert frame["k_error"].tolist() == pytest.approx([0.5 / 3, 0.9 / 3, 1.1 / 3, 1.3 / 3])
    assert frame["v_error"].tolist() == pytest.approx([1.0 / 3, 1.0 / 3, 1.2 / 3, 1.2 / 3])
    assert frame["n_accepted"].tolist() == [2] * 4
    assert frame["k_error_accepted"].tolist() == pytest.approx([0.0, 0.2, 0.3, 0.4])
    assert frame["v_error_accepted"].tolist() == pytest.approx([0.2, 0.2, 0.3, 0.3])


def test_a_method_that_accepts_nothing_has_no_accepted_error(
    make_fidelity, make_fidelity_edge, make_replay
) -> None:
    dense = make_fidelity_edge(action="dense", executed=20)
    run = make_replay((make_fidelity(0, (dense,)),), method="nonshared")
    frame = build_table("fidelity-layers", [run]).frame
    assert frame["k_error"].tolist() == [0.0] * 4
    assert frame["k_error_accepted"].isna().all()


@pytest.mark.parametrize("number", ["fidelity-edges", "fidelity-layers"])
def test_no_turns_make_no_rows(number: str, make_replay) -> None:
    assert len(build_table(number, []).frame) == 0
    assert len(build_table(number, [make_replay(n=4)]).frame) == 0
