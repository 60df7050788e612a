"""What other thresholds would have held, from recorded entropies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results import stats
from results.gates import by_quarter, held_by
from tests.results.conftest import _edge, _turn

ENTROPIES = st.none() | st.floats(0, 1)


def test_a_threshold_holds_what_lies_below_it() -> None:
    edges = (
        _edge(tokens=2, entropy=0.5, action="dense", executed=8),
        _edge(tokens=3, entropy=0.1),
        _edge(tokens=1, entropy=None, action="dense", executed=4),
        _edge(tokens=4, first=True),
    )
    assert held_by([_turn(edges=edges)]) == [
        (0.0, 0.0),
        (0.1, pytest.approx(3 / 6)),
        (0.5, pytest.approx(5 / 6)),
    ]


def test_nothing_to_reuse_has_no_curve() -> None:
    assert held_by([_turn()]) == held_by([]) == []


@given(st.lists(st.tuples(ENTROPIES, st.integers(1, 3)), min_size=1, max_size=5), st.floats(0, 1))
def test_at_the_threshold_that_was_used_it_is_rho(
    drawn: list[tuple[float | None, int]], used: float
) -> None:
    edges = tuple(
        _edge(tokens=tokens, entropy=entropy)
        if entropy is not None and entropy <= used
        else _edge(tokens=tokens, entropy=entropy, action="dense", executed=4 * tokens)
        for entropy, tokens in drawn
    )
    turns = [_turn(edges=edges, tokens=20)]
    held = [rho for threshold, rho in held_by(turns) if threshold <= used][-1]
    assert held == pytest.approx(stats.rho(turns, "entry"))


def test_quarters_are_of_the_requests(
    make_run: Callable[..., Any], make_turn: Callable[..., Any]
) -> None:
    turns = tuple(make_turn(index) for index in range(6) for _ in range(2))
    quarters = by_quarter([make_run(correct=(True,) * 6, turns=turns)])
    assert [[turn.sample_index for turn in part] for part in quarters] == [
        [0, 0, 1, 1],
        [2, 2],
        [3, 3, 4, 4],
        [5, 5],
    ]
