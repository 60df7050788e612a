"""Worker side: plans of the turns under way, source caches between turns. Needs no vLLM.

Every turn has a session, the same as on the Transformers engine; only the prefill is split between
the plug-in and vLLM. Whatever a method raises stays within its request.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from kvcmas.engine.accounting import Accounting, account
from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.cache import Buffer, Origin
from kvcmas.engine.contract import Decision, Plan
from kvcmas.engine.executor import Work, beyond
from kvcmas.engine.segments import Prompt
from kvcmas.engine.session import Closed, Engine, OpenTurn, Session
from kvcmas.errors import UserError
from kvcmas.serving.config import ServingConfig
from kvcmas.serving.messages import Begin, Drop, End
from kvcmas.serving.params import TurnParams
from kvcmas.serving.report import Seconds, TurnReport
from kvcmas.serving.settle import complete_output, complete_prompt

logger = logging.getLogger(__name__)

FlowKey = tuple[str, str]


class Pages(Protocol):
    """Makes the buffer over a request's cache blocks."""

    def __call__(self, blocks: Sequence[int], rows: int) -> Buffer:
        """A buffer of ``rows`` prompt rows."""
        ...


@dataclass
class _Flow:
    """A workflow: its session and the turns that have not ended."""

    session: Session
    remaining: set[str]
    active: int = 0


@dataclass
class _Turn:
    """A turn under way.

    ``opened`` is None where it takes no part in its workflow, ``entered`` if that counts it;
    ``buffer`` and ``work`` are those of the plug-in's part, if it has one.
    """

    begin: Begin
    prompt: Prompt
    opened: OpenTurn | None = None
    entered: bool = False
    buffer: Buffer | None = None
    work: Work | None = None
    fell_back: str | None = None
    loads: int = 0
    seconds: Seconds = field(default_factory=Seconds)


class Desk:
    """Begins and ends turns.

    Args:
        pages: see :class:`Pages`.
        clock: seconds.

    Attributes:
        reports: of turns that are over, oldest first; whoever reads them clears them.
        after_seconds: spent on what serves no first token; whoever reads it clears it.
        failed_blocks: blocks that could not be filled at all; vLLM has to execute their rows.
    """

    def __init__(
        self,
        model: ModelAdapter,
        pages: Pages,
        config: ServingConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._pages, self._clock = model, pages, clock
        self._turns: dict[str, _Turn] = {}
        self._flows: OrderedDict[FlowKey, _Flow] = OrderedDict()
        self.reports: list[TurnReport] = []
        self.after_seconds = 0.0
        self.failed_blocks: set[int] = set()
        self.configure(config)

    def configure(self, config: ServingConfig) -> None:
        """Start afresh with another method: no workflow, empty pools.

        Raises:
            UserError: turns are under way.
        """
        if self._turns:
            raise UserError("the method cannot be changed while turns are under way")
        self._config = config
        self._engines: dict[str, Engine] = {}
        self._flows.clear()
        self.reports.clear()

    def engine(self, tenant: str = "") -> Engine:
        """The method with what it has learned: one for all, or one per tenant."""
        scope = tenant if self._config.pool_scope == "tenant" else ""
        if scope not in self._engines:
            self._engines[scope] = Engine(
                self._model,
                self._config.make_method(),
                reference_prefix=self._config.reference_prefix,
                clock=self._clock,
            )
        return self._engines[scope]

    @property
    def stats(self) -> dict[str, int]:
        """What is held now: open turns, workflows, bytes of source caches and references."""
        sessions = [flow.session for flow in self._flows.values()]
        return {
            "turns": len(self._turns),
            "workflows": len(sessions),
            "source_bytes": sum(session.source_bytes for session in sessions),
            "reference_bytes": sum(session.reference_bytes for session in sessions),
        }

    def flow_of(self, key: str) -> FlowKey | None:
        """The workflow of an open turn."""
        turn = self._turns.get(key)
        return None if turn is None else _flow_key(turn.begin.params)

    @torch.inference_mode()
    def begin(self, begin: Begin) -> None:
        """Plan a turn, once, and carry its plan out before row ``stop``, again after preemption."""
        turn = self._turns.get(begin.key)
        again = turn is not None
        if turn is None:
            turn = _Turn(begin, begin.params.prompt(begin.ids))
            self._turns[begin.key] = turn
            self._open(turn)
        if begin.stop:
            started = self._clock()
            self._load(turn, begin)
            spent = self.engine(begin.params.tenant).now() - started
            name = "again" if again else "execute"
            inject = getattr(turn.buffer, "inject_seconds", 0.0) if not again else 0.0
            turn.seconds = replace(
                turn.seconds,
                **{name: getattr(turn.seconds, name) + spent},
                inject=turn.seconds.inject + inject,
            )

    @torch.inference_mode()
    def end(self, end: End) -> None:
        """Learn from a finished turn and keep what later turns read; then the blocks are free."""
        started, turn = self._clock(), self._turns.pop(end.key)
        flow = self._flows.get(_flow_key(turn.begin.params))
        output = turn.begin.params.output
        known = tuple(end.output if output is None else output)
        closed = Closed(frozenset(), {})
        if turn.opened is not None and flow is not None:
            try:
                closed = self._close(turn, flow.session, end, known)
            except Exception as error:  # a method may raise anything; the engine serves others
                turn.fell_back = _reason("after the first token", error)
                logger.exception("turn %s left nothing behind", end.key)
        self.reports.append(self._report(turn, flow, closed, len(known)))
        self._leave(turn, flow)
        self.after_seconds += self._clock() - started

    def drop(self, drop: Drop) -> None:
        """Forget a turn that never finished; what it read stays as it was."""
        turn = self._turns.pop(drop.key, None)
        if turn is not None:
            self._leave(turn, self._flows.get(_flow_key(turn.begin.params)))

    def _open(self, turn: _Turn) -> None:
        params = turn.begin.params
        engine, started = self.engine(params.tenant), self._clock()
        try:
            flow = self._flow(params)
            flow.active += 1
            turn.entered = True
            node = flow.session.workflow[params.node]
            turn.opened = flow.session.open(node, turn.prompt, params.force)
        except Exception as error:  # a method may raise anything; the engine serves others
            turn.fell_back = _reason("planning", error)
            logger.warning("turn %s runs densely: %s", turn.begin.key, turn.fell_back)
            turn.seconds = Seconds(plan=engine.now() - started)
        else:
            opened = turn.opened
            background = opened.started - started
            turn.seconds = Seconds(plan=opened.planned - opened.started, background=background)
            self.after_seconds += background
            if any(beyond(f, turn.prompt, turn.begin.stop) for f in opened.plan.fills):
                # The scheduler forgot the workflow earlier than the worker.
                self._refuse(turn, "the plan fills rows that vLLM executes")

    def _load(self, turn: _Turn, begin: Begin) -> None:
        """Fill and execute the plug-in's rows; densely if the plan cannot be carried out."""
        plan = Plan.make(turn.prompt) if turn.opened is None else turn.opened.plan
        turn.loads += 1
        try:
            self._run(turn, begin, plan)
            return
        except Exception as error:  # see above
            plan = self._refuse(turn, _reason("executing the plan", error))
        try:
            self._run(turn, begin, plan)
        except Exception as error:  # see above
            turn.fell_back = f"{turn.fell_back}; {_reason('executing densely', error)}"
            logger.warning("turn %s is left to vLLM: %s", begin.key, turn.fell_back)
            turn.opened = turn.buffer = turn.work = None
            self.failed_blocks.update(begin.blocks)

    def _refuse(self, turn: _Turn, reason: str) -> Plan:
        """Make the turn dense."""
        logger.warning("turn %s runs densely: %s", turn.begin.key, reason)
        turn.fell_back = reason
        if turn.opened is None:
            return Plan.make(turn.prompt)
        decisions = tuple(
            Decision(decision.segment, None, "dense", "fell back")
            for decision in turn.opened.plan.decisions
        )
        plan = Plan.make(turn.prompt, decisions=decisions)
        turn.opened = replace(turn.opened, plan=plan)
        return plan

    def _run(self, turn: _Turn, begin: Begin, plan: Plan) -> None:
        engine = self.engine(begin.params.tenant)
        turn.buffer = self._pages(begin.blocks, len(turn.prompt))
        turn.work = engine.executor.run_before(
            begin.stop,
            turn.buffer,
            turn.prompt,
            plan,
            hidden_layers=engine.method.wants.hidden_layers,
            received=engine.method.wants.received == "all",
        )
        turn.buffer.origin[:, begin.stop :] = Origin.EXECUTED

    def _close(self, turn: _Turn, session: Session, end: End, output: tuple[int, ...]) -> Closed:
        assert turn.opened is not None
        engine, opened = session.engine, turn.opened
        if not end.held:
            return session.close(opened, output, None)
        t0 = engine.now()
        left = self._pages(end.blocks, len(turn.prompt))
        if turn.buffer is not None:
            left.origin = turn.buffer.origin
            left.hidden, left.received = turn.buffer.hidden, turn.buffer.received
        else:
            left.origin.fill_(Origin.EXECUTED)
        replayed = turn.begin.params.output is not None
        left.length = len(turn.prompt) if replayed else end.rows
        buffer = complete_prompt(session, opened, left, output)
        t1 = engine.now()
        session.learn(opened, buffer)
        t2 = engine.now()
        complete_output(session, opened, buffer, output)
        t3 = engine.now()
        closed = session.close(opened, output, buffer)
        t4 = engine.now()
        turn.seconds = replace(
            turn.seconds, build=t2 - t1, extend=t3 - t2, capture=t1 - t0 + t4 - t3
        )
        return closed

    def _flow(self, params: TurnParams) -> _Flow:
        key = _flow_key(params)
        if key not in self._flows:
            session = self.engine(params.tenant).session(params.workflow, params.request)
            self._forget_idle()
            self._flows[key] = _Flow(session, {node.name for node in params.workflow.nodes})
        flow = self._flows[key]
        self._flows.move_to_end(key)
        if flow.session.workflow.nodes != params.workflow.nodes:
            raise UserError(f"request {params.request} has had another graph before")
        return flow

    def _forget_idle(self) -> None:
        idle = [key for key, flow in self._flows.items() if not flow.active]
        for key in idle[: max(0, len(self._flows) + 1 - self._config.workflows)]:
            logger.warning("workflow %s is forgotten, others are more recent", key[1])
            del self._flows[key]

    def _leave(self, turn: _Turn, flow: _Flow | None) -> None:
        """The turn is over; with its last turn the workflow is."""
        if flow is None or not turn.entered:
            return
        flow.active -= 1
        flow.remaining.discard(turn.begin.params.node)
        if not flow.remaining:
            del self._flows[_flow_key(turn.begin.params)]

    def _report(
        self, turn: _Turn, flow: _Flow | None, closed: Closed, output_tokens: int
    ) -> TurnReport:
        params, opened = turn.begin.params, turn.opened
        return TurnReport(
            key=turn.begin.key,
            tenant=params.tenant,
            request=params.request,
            node=params.node,
            prompt_sha256=turn.prompt.sha256,
            output_tokens=output_tokens,
            external_rows=turn.begin.stop if turn.work is not None else 0,
            decisions=() if opened is None else opened.plan.decisions,
            accounting=self._account(turn),
            fell_back=turn.fell_back,
            first_seen=closed.first_seen,
            holders=closed.holders,
            loads=turn.loads,
            seconds=turn.seconds,
            source_bytes=0 if flow is None else flow.session.source_bytes,
            reference_bytes=0 if flow is None else flow.session.reference_bytes,
        )

    def _account(self, turn: _Turn) -> Accounting:
        """The plug-in's work and vLLM's, which executes each of its rows in all layers."""
        spec, rows = self._model.spec, len(turn.prompt)
        origin = torch.full((spec.layers, rows), Origin.EXECUTED, dtype=torch.uint8)
        touched = torch.ones(rows, dtype=torch.bool)
        stop = row_layers = flops = 0
        if turn.work is not None and turn.buffer is not None:
            stop, origin = turn.begin.stop, turn.buffer.origin
            row_layers, flops = turn.work.row_layers, turn.work.flops
            touched[:stop] = turn.work.touched[:stop]
        attended = (stop + 1 + rows) * (rows - stop) // 2
        flops += spec.layers * spec.layer_flops(rows - stop, rows - stop, attended)
        flops += 2 * spec.hidden * spec.vocab
        row_layers += spec.layers * (rows - stop)
        counted = account(turn.prompt, origin, touched, row_layers, flops)
        charged = 0 if turn.opened is None else turn.opened.sources.charged
        return replace(counted, reference_tokens=charged)


def _flow_key(params: TurnParams) -> FlowKey:
    return params.tenant, params.request


def _reason(what: str, error: Exception) -> str:
    return f"{what} failed: {type(error).__name__}: {error}"
