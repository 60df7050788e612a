"""Pictures in traces: named in the file, kept beside it, the same prompt after reading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvcmas.engine.segments import Prompt, Visual, pf, ph
from kvcmas.engine.workflow import sequential
from kvcmas.errors import UserError
from traces.features import features_folder, save_features
from traces.schema import TraceTurn, TraceWorkflow, read_trace, write_trace

SHA = "ab" * 32
FEATURES = torch.arange(12, dtype=torch.float32).view(3, 4)


def workflow(visuals: tuple[Visual, ...]) -> tuple[TraceWorkflow, list[Prompt]]:
    nodes = sequential(2).nodes
    shared = ph("q", (1, 9, 9, 9, 2), visuals)
    prompts = [
        Prompt((pf((3,)), shared)),
        Prompt((pf((4, 5)), shared, ph("out0", (7, 8)), pf((6,)))),
    ]
    turns = tuple(
        TraceTurn.of(node, prompt, (7, 8)) for node, prompt in zip(nodes, prompts, strict=True)
    )
    return TraceWorkflow(request="r", turns=turns), prompts


def write(path: Path, made: TraceWorkflow) -> list[str]:
    write_trace(path, [made], kind="recorded", topology="sequential", vocab=10, origin={})
    return path.read_text().splitlines()


def test_a_picture_comes_back_as_it_went(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    made, prompts = workflow((Visual(1, FEATURES, SHA),))
    save_features(features_folder(path), prompts[0])
    save_features(features_folder(path.with_suffix(".partial")), prompts[1])  # the same folder
    write(path, made)
    (read,) = read_trace(path).workflows
    for turn, prompt in zip(read.turns, prompts, strict=True):
        assert turn.prompt == prompt and turn.prompt.sha256 == prompt.sha256
        ((rows, visual),) = turn.prompt.visuals
        assert torch.equal(visual.features, FEATURES) and len(rows) == 3
    assert len(list(features_folder(path).iterdir())) == 1


def test_the_file_names_a_picture_once_and_text_has_none(tmp_path: Path) -> None:
    line = json.loads(write(tmp_path / "t.jsonl", workflow((Visual(1, FEATURES, SHA),))[0])[1])
    first, second = (turn["segments"] for turn in line["turns"])
    assert first[1]["visuals"] == [{"start": 1, "rows": 3, "sha256": SHA}]
    assert second[1] == {"slot": "q"}
    text = write(tmp_path / "u.jsonl", workflow(())[0])[1]
    assert "visuals" not in text and not features_folder(tmp_path / "u.jsonl").exists()
    assert "visuals" not in workflow(())[0].model_dump_json()


def test_features_that_are_not_there_get_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    made, prompts = workflow((Visual(1, FEATURES, SHA),))
    with pytest.raises(UserError, match="were not recorded with its trace"):
        made.turns[0].prompt  # noqa: B018
    write(path, made)
    turn = read_trace(path).workflows[0].turns[0]
    with pytest.raises(UserError, match=r"cannot read the features of picture abababababab"):
        turn.prompt  # noqa: B018
    save_features(features_folder(path), prompts[0])
    (file,) = features_folder(path).iterdir()
    save_file({"features": FEATURES[:2]}, file)
    with pytest.raises(UserError, match="has 2 rows where the trace says 3"):
        turn.prompt  # noqa: B018
    file.write_bytes(b"?")
    with pytest.raises(UserError, match="cannot read the features"):
        turn.prompt  # noqa: B018
