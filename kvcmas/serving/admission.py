"""Scheduler side: which rows of a request the plug-in takes, and when. Needs no vLLM.

The worker alone knows what caches hold and what a gate will say. The scheduler has to name a number
of rows before that, so it takes the end of the last segment that *may* be filled; what the method
then refuses is executed by the plug-in itself.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcmas.engine.contract import Method
from kvcmas.engine.segments import Prompt
from kvcmas.errors import UserError
from kvcmas.serving.config import ServingConfig
from kvcmas.serving.messages import Begin, Drop, End, StepWork
from kvcmas.serving.params import KEY, TurnParams

logger = logging.getLogger(__name__)


@dataclass
class _Known:
    """A workflow as the scheduler sees it: slots that a finished turn touched, turns still open."""

    held: set[str] = field(default_factory=set)
    remaining: set[str] = field(default_factory=set)


@dataclass
class _Turn:
    """``stop`` is settled when the turn is scheduled, and stays when it comes back."""

    params: TurnParams
    prompt: Prompt
    stop: int | None = None


class Admission:
    """Decides per request how many rows are external, and collects the worker's work.

    Args:
        token_budget: vLLM's; external rows admitted per step where the settings name no number.
    """

    def __init__(self, config: ServingConfig, token_budget: int) -> None:
        self._token_budget = token_budget
        self._turns: dict[str, _Turn | None] = {}
        self._refused: dict[str, str] = {}
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._begins: list[Begin] = []
        self._ends: list[End | Drop] = []
        self._rows = 0
        self.fallbacks: Counter[str] = Counter()
        self.configure(config)

    def configure(self, config: ServingConfig) -> None:
        """Serve another method from now on; forgets all workflows.

        Raises:
            UserError: requests are under way.
        """
        if self._turns or self._ends:
            raise UserError("the method cannot be changed while requests are under way")
        self._config = config
        self._budget = config.row_budget or self._token_budget
        self._method = config.make_method()
        self._known.clear()
        self.fallbacks.clear()

    @property
    def open_turns(self) -> int:
        """Requests under way that carry parameters of ours."""
        return sum(turn is not None for turn in self._turns.values())

    @property
    def known_workflows(self) -> int:
        """Workflows that are not over."""
        return len(self._known)

    def external_rows(
        self, key: str, parameters: object, ids: Sequence[int] | None, multimodal: bool
    ) -> int | None:
        """Rows of the request that the plug-in takes, or None: ask again in the next step.

        A request that is not ours, or whose parameters make no sense, takes none: plain vLLM.
        """
        if key not in self._turns:
            self._turns[key] = self._accept(key, parameters, ids, multimodal)
        turn = self._turns[key]
        if turn is None:
            return 0
        stop = self._stop(turn) if turn.stop is None else turn.stop
        if stop and self._rows and self._rows + stop > self._budget:
            return None
        return stop

    def scheduled(self, key: str, blocks: Sequence[int], stop: int) -> None:
        """The request runs in this step with these blocks."""
        turn = self._turns.get(key)
        if turn is None:
            return
        self._rows += stop
        turn.stop = stop
        ids = tuple(turn.prompt.ids)
        self._begins.append(Begin(key, turn.params, ids, stop, tuple(blocks)))

    def take(self) -> StepWork:
        """The worker's work of this step."""
        work = StepWork(tuple(self._begins), tuple(self._ends))
        self._begins, self._ends, self._rows = [], [], 0
        return work

    def answer(self, key: str) -> dict[str, Any] | None:
        """What the client is told about a request that is about to finish; None if not ours.

        ``external_rows`` of the prompt, or why it ran on plain vLLM as a ``fallback``.
        """
        if key in self._refused:
            return {KEY: {"fallback": self._refused[key]}}
        turn = self._turns.get(key)
        return None if turn is None else {KEY: {"external_rows": turn.stop or 0}}

    def finished(
        self, key: str, output: Sequence[int], computed: int, blocks: Sequence[int], complete: bool
    ) -> bool:
        """The request is over; returns whether its blocks must stay until the worker is done.

        Args:
            computed: rows with K and V.
            complete: it ended by itself; an aborted or failed turn leaves nothing behind.
        """
        self._refused.pop(key, None)
        turn = self._turns.pop(key, None)
        if turn is None:
            return False
        self._note(turn, complete)
        if not complete:
            self._ends.append(Drop(key))
            return False
        rows = min(computed, len(turn.prompt) + len(output))
        held = keeps(self._method)
        self._ends.append(End(key, tuple(output), rows, tuple(blocks) if held else (), held))
        return held

    def _accept(
        self, key: str, parameters: object, ids: Sequence[int] | None, multimodal: bool
    ) -> _Turn | None:
        try:
            params = TurnParams.parse(parameters if isinstance(parameters, dict) else None)
            if params is None:
                return None
            if ids is None or multimodal:
                raise UserError("prompts of embeddings, images or videos are not supported")
            return _Turn(params, params.prompt(ids))
        except UserError as error:
            logger.warning("request %s runs on plain vLLM: %s", key, error)
            self.fallbacks[str(error)] += 1
            self._refused[key] = str(error)
            return None

    def _stop(self, turn: _Turn) -> int:
        prompt, wants = turn.prompt, self._method.wants
        last = len(prompt) - 1
        if wants.hidden_layers or wants.received == "all" or self._method.pf_policy != "dense":
            # Residual rows and attention are only in hand where the plug-in executes.
            return last
        known = self._known.get(_workflow(turn.params))
        held = known.held if known is not None and wants.sources else frozenset()
        ends = [
            prompt.rows(i).stop
            for i in prompt.shared()
            if turn.params.segments[i].accept is not False
            and (wants.references or prompt.slot(i) in held)
        ]
        return min(max(ends, default=0), last)

    def _note(self, turn: _Turn, complete: bool) -> None:
        params, key = turn.params, _workflow(turn.params)
        if key not in self._known:
            self._known[key] = _Known(remaining={n.name for n in params.workflow.nodes})
        known = self._known[key]
        self._known.move_to_end(key)
        known.remaining.discard(params.node)
        if complete:
            known.held |= {turn.prompt.slot(i) for i in turn.prompt.shared()}
            known.held.add(params.workflow[params.node].out_slot)
        if not known.remaining:
            del self._known[key]
        while len(self._known) > self._config.workflows:
            self._known.popitem(last=False)


def keeps(method: Method) -> bool:
    """Whether anything of a finished turn is needed: source caches, or something to learn from."""
    return method.wants.sources or method.learns


def _workflow(params: TurnParams) -> tuple[str, str]:
    return params.tenant, params.request
