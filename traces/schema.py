"""Trace files: workflows as token ids, so that every method replays identical prompts.

A trace is a JSONL file. Its first line is the header; every other line is one workflow. The
header's ``sha256`` covers the workflow lines as bytes, in order. Within a workflow the ids of a
slot are written where they appear first, as a turn's output or in a prompt; later prompts name the
slot alone. (Version 1 repeated the ids in every prompt; it is still read.) Images and videos are
named by their hash; what they are lies beside the trace (``traces.features``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from kvcmas.engine.segments import Prompt, Segment, Visual
from kvcmas.engine.workflow import Node, Workflow
from kvcmas.errors import UserError
from traces.features import features_folder, load_features

TRACE_VERSION: Final = 2


class TurnKey(NamedTuple):
    """Which turn: the workflow's request and the turn's node name."""

    request: str
    node: str


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TraceVisual(_Model):
    """An image or a video within a segment: its rows, and the hash that names its features."""

    start: NonNegativeInt
    rows: PositiveInt
    sha256: str
    _folder: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _beside(self, info: ValidationInfo) -> TraceVisual:
        self._folder = (info.context or {}).get("features")
        return self

    @property
    def visual(self) -> Visual:
        """The picture, as the engine takes it.

        Raises:
            UserError: its features are not beside the trace.
        """
        return Visual(self.start, load_features(self._folder, self.sha256, self.rows), self.sha256)


class TraceSegment(_Model):
    """One segment: ``slot`` for a PH, None for a PF; and the pictures in it."""

    slot: str | None
    ids: tuple[NonNegativeInt, ...]
    visuals: tuple[TraceVisual, ...] = ()

    @model_serializer(mode="wrap")
    def _words_have_no_pictures(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Traces of text are written as they were before there were pictures."""
        data: dict[str, Any] = handler(self)
        if not self.visuals:
            data.pop("visuals", None)
        return data


class TraceTurn(_Model):
    """One turn: its place in the workflow graph, its prompt and its output (without stop token)."""

    agent: NonNegativeInt
    round: int = Field(default=1, ge=1)
    parents: tuple[str, ...]
    segments: tuple[TraceSegment, ...]
    output: tuple[NonNegativeInt, ...]

    @property
    def node(self) -> Node:
        """The turn's node in the workflow graph."""
        return Node(self.agent, self.round, self.parents)

    @property
    def prompt(self) -> Prompt:
        """The prompt, as the engine takes it."""
        return Prompt(
            tuple(
                Segment("PH" if s.slot else "PF", s.ids, s.slot, tuple(v.visual for v in s.visuals))
                for s in self.segments
            )
        )

    @classmethod
    def of(cls, node: Node, prompt: Prompt, output: Sequence[int]) -> TraceTurn:
        """Record a turn."""
        return cls(
            agent=node.agent,
            round=node.round,
            parents=node.parents,
            segments=tuple(
                TraceSegment(
                    slot=s.slot,
                    ids=s.ids,
                    visuals=tuple(
                        TraceVisual(start=v.start, rows=len(v.rows), sha256=v.sha256)
                        for v in s.visuals
                    ),
                )
                for s in prompt.segments
            ),
            output=tuple(output),
        )


class TraceWorkflow(_Model):
    """One user request with all its turns in static order."""

    request: str
    turns: tuple[TraceTurn, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_slots(cls, data: Any) -> Any:
        """Give every shared segment the ids of its slot; what is malformed is left to pydantic."""
        match data:
            case {"turns": [*turns]} if all(isinstance(turn, dict) for turn in turns):
                known: dict[str, Any] = {}
                return {**data, "turns": [_filled_in(turn, known) for turn in turns]}
        return data

    def workflow(self, name: str) -> Workflow:
        """The graph of this request."""
        return Workflow(name, tuple(turn.node for turn in self.turns))


class TraceHeader(_Model):
    """What made the trace.

    ``kind`` is ``recorded`` (NonShared trajectories of a model on a bench) or ``generated``;
    ``origin`` holds the settings that reproduce it.
    """

    version: Literal[1, 2] = TRACE_VERSION
    kind: Literal["recorded", "generated"]
    topology: str
    workflows: NonNegativeInt
    sha256: str
    vocab: NonNegativeInt
    origin: dict[str, Any]


class Trace(_Model):
    """A whole trace."""

    header: TraceHeader
    workflows: tuple[TraceWorkflow, ...]


def turn_keys(workflows: Sequence[TraceWorkflow]) -> list[TurnKey]:
    """All turns in the trace's order: workflow by workflow, each in static order.

    Raises:
        UserError: two workflows of the same request; their turns could not be told apart.
    """
    seen: set[str] = set()
    for workflow in workflows:
        if workflow.request in seen:
            raise UserError(f"two workflows of the trace are called {workflow.request!r}")
        seen.add(workflow.request)
    return [TurnKey(w.request, turn.node.name) for w in workflows for turn in w.turns]


def write_trace(
    path: Path,
    workflows: Sequence[TraceWorkflow],
    *,
    kind: Literal["recorded", "generated"],
    topology: str,
    vocab: int,
    origin: dict[str, Any],
) -> Trace:
    """Write a trace atomically.

    Raises:
        UserError: the file cannot be written.
    """
    lines = [_line(_slots_once(workflow)) for workflow in workflows]
    header = TraceHeader(
        kind=kind,
        topology=topology,
        workflows=len(workflows),
        sha256=_sha256(lines),
        vocab=vocab,
        origin=origin,
    )
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(b"".join((_line(header.model_dump(mode="json")), *lines)))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write trace {path}: {error.strerror}") from error
    return Trace(header=header, workflows=tuple(workflows))


def read_trace(path: Path) -> Trace:
    """Read and verify a trace.

    Raises:
        UserError: no such file, a malformed line (with its number), or a hash that does not fit.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"cannot read trace {path}: {error.strerror}") from error
    if not lines:
        raise UserError(f"{path}:1: an empty file is no trace")
    number = 1
    beside = {"features": features_folder(path)}
    try:
        header = TraceHeader.model_validate_json(lines[0])
        workflows = []
        for line in lines[1:]:
            number += 1
            workflows.append(TraceWorkflow.model_validate_json(line, context=beside))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}:{number}: {where}: {first['msg']}") from error
    if _sha256(lines[1:]) != header.sha256 or len(workflows) != header.workflows:
        raise UserError(
            f"{path}: the workflows do not fit the header's sha256; the file was changed"
        )
    return Trace(header=header, workflows=tuple(workflows))


def _slots_once(workflow: TraceWorkflow) -> dict[str, Any]:
    """The workflow as JSON, without what an earlier turn already gave for a slot."""
    data = workflow.model_dump(mode="json")
    known: dict[str, dict[str, Any]] = {}
    for turn, row in zip(workflow.turns, data["turns"], strict=True):
        for segment in row["segments"]:
            slot, content = segment["slot"], _content(segment)
            if slot is None:
                continue
            if slot not in known:
                known[slot] = content
            elif known[slot] == content:
                for key in content:
                    del segment[key]
        known.setdefault(turn.node.out_slot, {"ids": row["output"]})
    return data


def _content(segment: dict[str, Any]) -> dict[str, Any]:
    """What fills a slot: its ids, and its pictures if it has any."""
    return {key: segment[key] for key in ("ids", "visuals") if key in segment}


def _filled_in(turn: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The reverse for one turn; ``known`` collects the content per slot."""
    segments = turn.get("segments")
    if isinstance(segments, list):
        turn = {**turn, "segments": [_with_ids(segment, known) for segment in segments]}
    match turn:
        case {"agent": int(agent), "output": output}:
            known.setdefault(Node(agent, turn.get("round", 1)).out_slot, {"ids": output})
    return turn


def _with_ids(segment: Any, known: dict[str, Any]) -> Any:
    match segment:
        case {"slot": str(slot), "ids": _}:
            known.setdefault(slot, _content(segment))
        case {"slot": str(slot)} if slot in known:
            return {**segment, **known[slot]}
    return segment


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":"), sort_keys=True).encode() + b"\n"


def _sha256(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()
