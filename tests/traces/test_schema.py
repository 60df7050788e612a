from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.workflow import fully_connected
from kvcmas.errors import UserError
from traces.schema import (
    Trace,
    TraceTurn,
    TraceWorkflow,
    TurnKey,
    read_trace,
    turn_keys,
    write_trace,
)

NODES = fully_connected(3).nodes
PROMPTS = (
    Prompt((pf([1]), ph("q", [2, 3]))),
    Prompt((ph("q", [2, 3]), pf([4]), ph("out0", [5]), pf([6]))),
    # A slot that changes: no engine takes it, but a file keeps what it was given.
    Prompt((ph("q", [7]), ph("out0", []), ph("out1", [8, 9]))),
)
OUTPUTS = ((5,), (8, 9), ())


def a_workflow(request: str = "r") -> TraceWorkflow:
    turns = map(TraceTurn.of, NODES, PROMPTS, OUTPUTS)
    return TraceWorkflow(request=request, turns=tuple(turns))


def written(path: Path, *workflows: TraceWorkflow) -> Trace:
    return write_trace(
        path, workflows, kind="recorded", topology="fully_connected", vocab=10, origin={"n": 1}
    )


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl", a_workflow("a"), a_workflow("b"))
    assert read_trace(tmp_path / "t.jsonl") == trace
    assert [turn.prompt for turn in trace.workflows[0].turns] == list(PROMPTS)


def test_ids_of_a_slot_are_written_once(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl", a_workflow())
    segments = [turn["segments"] for turn in lines_of(tmp_path / "t.jsonl")[1]["turns"]]
    assert "ids" in segments[0][1]
    assert segments[1][0] == {"slot": "q"}
    assert segments[1][2] == {"slot": "out0"}
    # Other ids than those known for the slot stay where they are.
    assert segments[2] == [
        {"slot": "q", "ids": [7]},
        {"slot": "out0", "ids": []},
        {"slot": "out1"},
    ]


def test_version_1_repeats_ids_and_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace = written(path, a_workflow())
    header = trace.header.model_dump() | {"version": 1}
    body = trace.workflows[0].model_dump_json() + "\n"
    header["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    path.write_text(json.dumps(header) + "\n" + body)
    assert read_trace(path).workflows == trace.workflows


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ('{"request":"r","turns":[{"agent":0,"parents":[],"output":[]', ":2:"),
        ('{"request":"r","turns":3}', ":2: turns"),
        ('{"request":"r","turns":[3]}', ":2: turns.0"),
        ('{"request":"r","turns":[{"agent":0,"parents":[],"output":[],"segments":3}]}', "segments"),
        (
            '{"request":"r","turns":[{"agent":0,"parents":[],"output":[],'
            '"segments":[{"slot":"out1"}]}]}',
            ":2: turns.0.segments.0.ids",
        ),
        (
            '{"request":"r","turns":[{"agent":0,"parents":[],"output":[],'
            '"segments":[{"slot":null,"ids":[-1]}]}]}',
            ":2: turns.0.segments.0.ids.0",
        ),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, broken: str, named: str) -> None:
    path = tmp_path / "t.jsonl"
    written(path, a_workflow())
    path.write_text(path.read_text().splitlines()[0] + "\n" + broken + "\n")
    with pytest.raises(UserError, match=named):
        read_trace(path)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written(path, a_workflow())
    path.write_text(path.read_text().replace('"ids":[2,3]', '"ids":[2,4]'))
    with pytest.raises(UserError, match="sha256"):
        read_trace(path)


def test_turns_of_equal_requests_cannot_be_told_apart() -> None:
    assert turn_keys([a_workflow("a")])[1] == TurnKey("a", "A1")
    with pytest.raises(UserError, match="'a'"):
        turn_keys([a_workflow("a"), a_workflow("a")])
