"""What clients send: strict, and back and forth without loss."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from kvcmas.engine.segments import Prompt, Visual, pf, ph
from kvcmas.engine.workflow import fan_in, sequential
from kvcmas.errors import UserError
from kvcmas.serving.params import KEY, TurnParams

WORKFLOW = sequential(2)
PROMPT = Prompt((pf([1, 2]), ph("q", [3, 4, 5]), pf([]), ph("out0", [6])))


def params(**changes: Any) -> dict[str, Any]:
    made = TurnParams.of(WORKFLOW, WORKFLOW["A1"], "r", PROMPT, force={1: True}, output=[7])
    sent: dict[str, Any] = copy.deepcopy(made.to_kv_transfer_params())
    sent[KEY].update(changes)
    return sent


def test_json_gives_the_turn_back() -> None:
    parsed = TurnParams.parse(json.loads(json.dumps(params())))
    assert parsed is not None
    assert (parsed.request, parsed.node, parsed.output) == ("r", "A1", (7,))
    assert parsed.workflow.nodes == WORKFLOW.nodes
    assert parsed.prompt(PROMPT.ids) == PROMPT
    assert parsed.force == {1: True}


def test_pictures_are_not_served() -> None:
    image = Visual(0, torch.zeros(3, 4), "a" * 64)
    prompt = Prompt((pf([1]), ph("q", [9, 9, 9], (image,))))
    with pytest.raises(UserError, match="serving takes text only"):
        TurnParams.of(WORKFLOW, WORKFLOW["A0"], "r", prompt)


def test_other_connectors_parameters_are_not_ours() -> None:
    assert TurnParams.parse(None) is None
    assert TurnParams.parse({"do_remote_prefill": True}) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node": "A7"}, "the graph has no turn 'A7'"),
        ({"colour": 1}, "colour: Extra inputs"),
        ({"request": ""}, "request: String should have at least 1"),
        ({"segments": []}, "segments: Tuple should have at least 1"),
        ({"segments": [{"tokens": -1}]}, "segments.0.tokens"),
        ({"segments": [{"tokens": 2, "accept": True}]}, "segment 0 is not shared"),
        ({"segments": [{"tokens": 2, "slot": "out1"}]}, "A1 does not read slot 'out1'"),
        ({"segments": [{"tokens": 2, "slot": "q"}] * 2}, "'q' fills two segments"),
        ({"graph": [{"agent": 0}, {"agent": 1, "parents": ["A5"]}]}, "does not come before"),
        ({"output": [-1]}, "output.0"),
    ],
)
def test_a_malformed_turn_says_what_is_wrong(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=r"^kvcmas") as caught:
        TurnParams.parse(params(**changes))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_segments_have_to_add_up_to_the_prompt() -> None:
    parsed = TurnParams.parse(params())
    assert parsed is not None
    with pytest.raises(UserError, match="the segments hold 6 tokens, the prompt has 5"):
        parsed.prompt(PROMPT.ids[1:])


def test_a_later_turn_reads_all_its_parents() -> None:
    workflow = fan_in(3)
    prompt = Prompt((ph("q", [1]), ph("out0", [2]), ph("out1", [3])))
    assert TurnParams.of(workflow, workflow["A2"], "r", prompt).prompt([1, 2, 3]) == prompt
