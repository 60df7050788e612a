"""What a client says about one agent turn, as vLLM's per-request ``kv_transfer_params``.

A prompt reaches vLLM as token ids without structure. These parameters add it: which user request
and turn this is, and which runs of the ids are agent-specific (PF) or shared (PH). Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.workflow import Node, Workflow
from kvcmas.errors import UserError

# The key under which a request's kv_transfer_params hold ours; other connectors have other keys.
KEY: Final = "kvcmas"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NodeShape(_Model):
    """One turn of the static graph."""

    agent: NonNegativeInt
    round: PositiveInt = 1
    parents: tuple[str, ...] = ()


class SegmentShape(_Model):
    """A run of ``tokens`` ids: shared if it names a ``slot``, else agent-specific.

    ``accept`` takes the decision beforehand (replay at a set reuse ratio): True reuses, False
    executes, None leaves it to the method.
    """

    tokens: NonNegativeInt
    slot: str | None = Field(default=None, min_length=1)
    accept: bool | None = None


class TurnParams(_Model):
    """One agent turn.

    Attributes:
        request: the user request; all turns of its workflow carry the same id, no other does.
        node: this turn's name in the graph, ``A{agent}`` with ``@{round}`` beyond the first.
        graph: all turns in static topological order, the same in every turn of the request.
        segments: the prompt's segments in order; their tokens add up to the prompt.
        output: recorded output ids (replay). They take the place of what the turn generates: their
            K and V become the source of its output slot, made after the first token.
        tenant: whose request it is; workflows and, where the server says so, pools are per tenant.
    """

    request: str = Field(min_length=1)
    node: str
    graph: tuple[NodeShape, ...] = Field(min_length=1)
    segments: tuple[SegmentShape, ...] = Field(min_length=1)
    output: tuple[NonNegativeInt, ...] | None = None
    tenant: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        workflow = self.workflow
        try:
            reads = workflow.consumes(workflow[self.node])
        except KeyError:
            raise ValueError(f"the graph has no turn {self.node!r}") from None
        seen: set[str] = set()
        for i, segment in enumerate(self.segments):
            if segment.slot is None:
                if segment.accept is not None:
                    raise ValueError(f"segment {i} is not shared, so there is nothing to accept")
            elif segment.slot not in reads:
                raise ValueError(
                    f"{self.node} does not read slot {segment.slot!r} in this graph; it reads"
                    f" {', '.join(reads)}"
                )
            elif segment.slot in seen:
                raise ValueError(f"slot {segment.slot!r} fills two segments of one prompt")
            else:
                seen.add(segment.slot)
        return self

    @classmethod
    def of(
        cls,
        workflow: Workflow,
        node: Node,
        request: str,
        prompt: Prompt,
        *,
        force: Mapping[int, bool] | None = None,
        output: Sequence[int] | None = None,
        tenant: str = "",
    ) -> TurnParams:
        """Parameters of turn ``node`` of ``request``; ``force`` as in the engine's ``Turn``.

        Raises:
            UserError: a prompt with images or videos; only ids reach a served model.
        """
        if prompt.visuals:
            raise UserError("serving takes text only: this prompt has an image or a video in it")
        force = force or {}
        return cls(
            request=request,
            node=node.name,
            graph=tuple(
                NodeShape(agent=n.agent, round=n.round, parents=n.parents) for n in workflow.nodes
            ),
            segments=tuple(
                SegmentShape(tokens=len(s), slot=s.slot, accept=force.get(i) if s.slot else None)
                for i, s in enumerate(prompt.segments)
            ),
            output=None if output is None else tuple(output),
            tenant=tenant,
        )

    @classmethod
    def parse(cls, kv_transfer_params: Mapping[str, Any] | None) -> TurnParams | None:
        """From a request's ``kv_transfer_params``; None if it is not meant for us.

        Raises:
            UserError: malformed or contradictory parameters, with the first reason.
        """
        if kv_transfer_params is None or KEY not in kv_transfer_params:
            return None
        try:
            return cls.model_validate(kv_transfer_params[KEY])
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            reason = first["msg"].removeprefix("Value error, ")
            raise UserError(f"{KEY}{'.' if where else ''}{where}: {reason}") from error

    def to_kv_transfer_params(self) -> dict[str, Any]:
        """JSON-able; the inverse of :meth:`parse`."""
        return {KEY: self.model_dump(mode="json", exclude_defaults=True)}

    @property
    def workflow(self) -> Workflow:
        """The static graph."""
        nodes = tuple(Node(n.agent, n.round, n.parents) for n in self.graph)
        return Workflow("served", nodes)

    @property
    def force(self) -> dict[int, bool]:
        """Decisions taken beforehand, by segment index."""
        return {i: s.accept for i, s in enumerate(self.segments) if s.accept is not None}

    def prompt(self, ids: Sequence[int]) -> Prompt:
        """The prompt that these ids and segments make.

        Raises:
            UserError: the segments do not add up to the ids.
        """
        total = sum(segment.tokens for segment in self.segments)
        if total != len(ids):
            raise UserError(f"the segments hold {total} tokens, the prompt has {len(ids)}")
        ids, parts, start = tuple(ids), [], 0
        for segment in self.segments:
            part = ids[start : start + segment.tokens]
            parts.append(pf(part) if segment.slot is None else ph(segment.slot, part))
            start += segment.tokens
        return Prompt(tuple(parts))
