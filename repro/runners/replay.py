"""Replaying a trace on an engine: identical ids for every method."""

from __future__ import annotations

from collections.abc import Iterator

from kvcmas.engine.session import Engine, TurnResult
from traces.schema import TraceWorkflow


def replay(
    engine: Engine,
    workflow: TraceWorkflow,
    topology: str,
    *,
    accept: bool | None = None,
    logits: int = 0,
    keep_buffers: bool = False,
) -> Iterator[TurnResult]:
    """Every turn of a recorded workflow, with its recorded output forced.

    ``accept`` decides every gate beforehand: True accepts, False refuses (pool warm-up).
    ``logits``: after how many tokens of the output they are wanted, see :meth:`Session.run`.
    """
    session = engine.session(workflow.workflow(topology), workflow.request)
    for turn in workflow.turns:
        prompt = turn.prompt
        yield session.run(
            turn.node,
            prompt,
            max_new_tokens=len(turn.output),
            output=turn.output,
            force=None if accept is None else dict.fromkeys(prompt.shared(), accept),
            logits=logits,
            keep_buffer=keep_buffers,
        )


def warm_up(engine: Engine, workflows: tuple[TraceWorkflow, ...], topology: str) -> None:
    """Let a method learn from these workflows with every correction refused."""
    for workflow in workflows:
        for _ in replay(engine, workflow, topology, accept=False):
            pass
