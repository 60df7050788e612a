"""The scheduler's side: how many rows are the plug-in's, and when."""

from __future__ import annotations

from typing import Any

import pytest

from kvcmas.engine.segments import Prompt
from kvcmas.engine.workflow import sequential
from kvcmas.errors import UserError
from kvcmas.serving.admission import Admission
from kvcmas.serving.config import ServingConfig
from kvcmas.serving.messages import Begin, Drop, End
from kvcmas.serving.params import KEY, TurnParams
from tests.workflows import agent_prompt, random_ids

WORKFLOW = sequential(3)
TEXTS = {"q": random_ids(1, 30), "out0": random_ids(2, 10), "out1": random_ids(3, 10)}


def admission(method: str = "fullshared", budget: int = 1000, **settings: Any) -> Admission:
    return Admission(ServingConfig(method=method, settings=settings), budget)


def turn(at: int, request: str = "r", force: dict[int, bool] | None = None) -> tuple[Any, Prompt]:
    node = WORKFLOW.nodes[at]
    prompt = agent_prompt(WORKFLOW, node, {s: TEXTS[s] for s in ("q", "out0", "out1")[: at + 1]})
    params = TurnParams.of(WORKFLOW, node, request, prompt, force=force)
    return params.to_kv_transfer_params(), prompt


def rows(side: Admission, key: str, sent: tuple[Any, Prompt]) -> int | None:
    return side.external_rows(key, sent[0], sent[1].ids, False)


def finish(side: Admission, key: str, sent: tuple[Any, Prompt], *, complete: bool = True) -> bool:
    """Schedule the request, and end it after one token."""
    stop = rows(side, key, sent)
    assert stop is not None
    side.scheduled(key, [1, 2], stop)
    return side.finished(key, [5], len(sent[1]), [1, 2], complete)


def test_external_rows_end_with_the_last_segment_that_somebody_holds() -> None:
    side = admission()
    assert rows(side, "a", turn(0)) == 0
    assert finish(side, "a", turn(0))
    sent = turn(1)
    assert rows(side, "b", sent) == sent[1].rows(3).stop
    forced = turn(1, force={3: False})
    assert rows(side, "c", forced) == forced[1].rows(1).stop
    assert rows(side, "d", turn(1, force={1: False, 3: False})) == 0


def test_another_workflow_holds_nothing() -> None:
    side = admission()
    finish(side, "a", turn(0))
    assert rows(side, "b", turn(1, request="other")) == 0


def test_references_may_be_filled_from_the_first_turn_on() -> None:
    sent = turn(0)
    assert rows(admission("kvcmas", chained=False), "a", sent) == sent[1].rows(1).stop
    assert rows(admission("kvcmas"), "a", sent) == 0


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("droidspeak", {"blocks": ((2, 2),)}),
        ("relaycaching", {"span": (0, 1, 2), "influence": "all"}),
        ("fullshared", {"pf_policy": "rotate"}),
    ],
)
def test_what_vllm_does_not_hand_out_is_executed_by_the_plug_in(
    method: str, settings: dict[str, Any]
) -> None:
    sent = turn(0)
    assert rows(admission(method, **settings), "a", sent) == len(sent[1]) - 1


def test_a_prompt_that_ends_with_a_shared_segment_keeps_its_last_row() -> None:
    side = admission()
    finish(side, "a", turn(0))
    node = WORKFLOW.nodes[1]
    prompt = agent_prompt(WORKFLOW, node, {"q": TEXTS["q"]}, tail=0)
    sent = (TurnParams.of(WORKFLOW, node, "r", prompt).to_kv_transfer_params(), prompt)
    assert rows(side, "b", sent) == len(prompt) - 1


def test_the_row_budget_defers_but_never_starves() -> None:
    side = admission(budget=60)
    for key in ("x", "y", "z"):
        finish(side, key, turn(0, request=key))
    side.take()
    waiting = {key: turn(1, request=key) for key in ("x", "y", "z")}
    admitted = []
    while waiting:
        for key in list(waiting):
            stop = rows(side, f"{key}1", waiting[key])
            if stop is not None:
                side.scheduled(f"{key}1", [1], stop)
                admitted.append(key)
                del waiting[key]
        work = side.take()
        # A turn has more rows than half the budget: one in a step.
        assert [begin.stop > 30 for begin in work.begins] == [True]
    assert admitted == ["x", "y", "z"]


def test_a_turn_that_comes_back_takes_the_same_rows() -> None:
    """Preempted; meanwhile another turn has ended, so that more could be reused."""
    side = admission()
    finish(side, "a", turn(0))
    sent = turn(2)
    stop = rows(side, "c", sent)
    assert stop == sent[1].rows(1).stop
    side.scheduled("c", [1], stop)
    finish(side, "b", turn(1))
    assert rows(side, "c", sent) == stop


def test_messages_say_what_happened() -> None:
    side = admission()
    sent = turn(0)
    finish(side, "a", sent)
    work = side.take()
    assert [type(begin) for begin in work.begins] == [Begin]
    assert work.begins[0].ids == tuple(sent[1].ids)
    (end,) = work.ends
    assert end == End("a", (5,), len(sent[1]), (1, 2), True)
    assert side.take().begins == ()
    rows(side, "b", turn(1))
    assert not side.finished("b", [], 0, [], False)
    assert side.take().ends == (Drop("b"),)
    assert side.open_turns == 0


def test_nothing_is_held_for_a_method_that_needs_nothing() -> None:
    assert not finish(admission("nonshared"), "a", turn(0))


def test_an_aborted_turn_is_no_source() -> None:
    side = admission()
    finish(side, "a", turn(0), complete=False)
    assert rows(side, "b", turn(1)) == 0


def test_a_workflow_is_forgotten_after_its_last_turn() -> None:
    side = admission()
    for at in range(3):
        finish(side, f"t{at}", turn(at))
        assert side.known_workflows == (at < 2)


def test_the_longest_idle_workflow_is_forgotten_first() -> None:
    side = Admission(ServingConfig(method="fullshared", workflows=2), 1000)
    for key in ("x", "y", "z"):
        finish(side, key, turn(0, request=key))
    assert rows(side, "x1", turn(1, request="x")) == 0
    assert rows(side, "z1", turn(1, request="z")) != 0


@pytest.mark.parametrize(
    ("sent", "ids", "multimodal", "reason"),
    [
        ({KEY: {"request": "r"}}, [1, 2], False, "Field required"),
        (turn(0)[0], [1, 2], False, "the prompt has 2"),
        (turn(0)[0], turn(0)[1].ids, True, "images"),
        (turn(0)[0], None, False, "embeddings"),
    ],
)
def test_what_cannot_be_served_runs_on_plain_vllm(
    sent: Any, ids: list[int] | None, multimodal: bool, reason: str
) -> None:
    side = admission()
    assert side.external_rows("a", sent, ids, multimodal) == 0
    answer = side.answer("a")
    assert answer is not None
    assert reason in answer[KEY]["fallback"]
    side.scheduled("a", [1], 0)
    assert not side.finished("a", [5], 2, [1], True)
    assert side.take().begins == ()
    assert sum(side.fallbacks.values()) == 1
    assert side.external_rows("b", None, [1, 2], False) == 0
    assert side.answer("b") is None


def test_the_method_stays_while_requests_are_under_way() -> None:
    side = admission()
    rows(side, "a", turn(0))
    with pytest.raises(UserError, match="under way"):
        side.configure(ServingConfig(method="nonshared"))
