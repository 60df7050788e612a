"""Running workflows: one engine per (model, method), one session per user request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcmas.engine.accounting import Accounting
from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.cache import Buffer, ContiguousBuffer, SegmentCache
from kvcmas.engine.contract import Decision, Held, Method, Plan, State, Turn
from kvcmas.engine.executor import Executor
from kvcmas.engine.prefixes import PrefixStore
from kvcmas.engine.segments import Prompt, Segment, Visual
from kvcmas.engine.workflow import Node, Workflow


@dataclass(frozen=True)
class Times:
    """Seconds of one turn's parts; TTFT is plan + prefill, E2E is their sum."""

    plan: float
    prefill: float
    build: float
    decode: float
    capture: float

    @property
    def ttft(self) -> float:
        """From the turn's start to its first token."""
        return self.plan + self.prefill

    @property
    def e2e(self) -> float:
        """The whole turn, anchor building included."""
        return self.plan + self.prefill + self.build + self.decode + self.capture


@dataclass(frozen=True)
class TurnResult:
    """Everything a harness needs to score and record one turn.

    Attributes:
        output: generated ids without the stop token.
        finish: ``stop`` (a stop token was sampled) or ``length``.
        first_logits: ``[vocab]``, what the first token was drawn from.
        continuation_logits: teacher forcing only, ``[tokens, vocab]``, after each token as asked.
        first_seen: PH segments that nobody had held before this turn.
        holders: node that held each other PH last.
        source_bytes: source caches of this workflow after the turn.
        reference_bytes: its context-free references.
        buffer: the turn's KV buffer, where asked for.
    """

    node: str
    prompt: Prompt
    output: tuple[int, ...]
    finish: str
    first_logits: Tensor
    continuation_logits: Tensor | None
    decisions: tuple[Decision, ...]
    accounting: Accounting
    times: Times
    first_seen: frozenset[int]
    holders: Mapping[int, str]
    source_bytes: int
    reference_bytes: int
    buffer: ContiguousBuffer | None


class Engine:
    """A method on a model, with everything it has learned; process-wide, shared by all requests.

    Args:
        reference_prefix: ids before a segment in its context-free reference prefill, dropped
            afterwards; without them the first tokens would become attention sinks.
        clock: seconds; a test may pass its own.
    """

    def __init__(
        self,
        model: ModelAdapter,
        method: Method,
        *,
        reference_prefix: Sequence[int] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor = Executor(model)
        self.method = method
        self.reference_prefix = tuple(reference_prefix)
        self.prefixes: PrefixStore | None = None
        if method.pf_policy != "dense":
            self.prefixes = PrefixStore(method.pf_rank if method.pf_policy == "delta" else None)
        self._clock = clock

    def now(self) -> float:
        """The clock, after all queued device work."""
        device = self.executor.model.spec.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return self._clock()

    def session(self, workflow: Workflow, request: str) -> Session:
        """A fresh workflow instance for one user request."""
        return Session(self, workflow, request)

    def state(self) -> State:
        """What method and prefix store have learned, for a checkpoint."""
        state = self.method.state()
        merged = State({"method": state.meta}, {f"m.{k}": v for k, v in state.entries.items()})
        if self.prefixes is not None:
            prefix = self.prefixes.state()
            merged.meta["prefixes"] = prefix.meta
            merged.entries |= {f"p.{k}": v for k, v in prefix.entries.items()}
        return merged

    def load_state(self, state: State) -> None:
        """Restore :meth:`state`."""

        def part(mark: str) -> dict[str, dict[str, Tensor]]:
            return {k[2:]: v for k, v in state.entries.items() if k.startswith(mark)}

        self.method.load_state(State(state.meta["method"], part("m.")))
        if self.prefixes is not None:
            self.prefixes.load_state(State(state.meta["prefixes"], part("p.")))


@dataclass
class _Memory:
    """Shared memory of one workflow: who held each slot last, its cache, and references."""

    users: dict[str, str] = field(default_factory=dict)
    content: dict[str, tuple[tuple[int, ...], tuple[Visual, ...]]] = field(default_factory=dict)
    caches: dict[str, Held] = field(default_factory=dict)
    references: dict[str, SegmentCache] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenTurn:
    """A turn that has its plan: to be executed, learned from and closed.

    ``started`` and ``planned`` are the clock's readings around the method's planning.
    """

    node: Node
    turn: Turn
    sources: _Sources
    plan: Plan
    started: float
    planned: float


@dataclass(frozen=True)
class Closed:
    """What a turn changed in the shared memory, whatever the method: see :class:`TurnResult`."""

    first_seen: frozenset[int]
    holders: Mapping[int, str]


class Session:
    """One user request on its way through a workflow.

    :meth:`run` is all of a turn. An engine with a prefill and a decoder of its own takes its parts:
    :meth:`open`, then the plan, :meth:`learn`, its decoding, :meth:`close`.
    """

    def __init__(self, engine: Engine, workflow: Workflow, request: str) -> None:
        self.engine = engine
        self.workflow = workflow
        self.request = request
        self._order = {node.name: i for i, node in enumerate(workflow.nodes)}
        self._memory = _Memory()

    @torch.inference_mode()
    def run(
        self,
        node: Node,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        output: Sequence[int] | None = None,
        force: Mapping[int, bool] | None = None,
        logits: int | None = None,
        keep_buffer: bool = False,
        stepwise: bool = False,
    ) -> TurnResult:
        """Prefill under the method, decode greedily, and leave source caches for later turns.

        Args:
            output: forced output ids (replay); decoding is then one teacher-forced pass.
            logits: after how many forced ids they are wanted (None: all); unread outputs end there.
            stepwise: feed forced ids one by one, at the cost of decoding; their logits are dropped.
            force: see :class:`~kvcmas.engine.contract.Turn`.
            keep_buffer: hand out the turn's KV buffer with the result.

        Raises:
            UserError: the context is longer than the model allows.
            ValueError: a slot that holds other tokens than this prompt says.
        """
        engine, wants = self.engine, self.engine.method.wants
        room = len(output) if output is not None else max_new_tokens
        opened = self.open(node, prompt, force)
        prefill = engine.executor.run(
            prompt,
            opened.plan,
            new_tokens=room,
            hidden_layers=wants.hidden_layers,
            received=wants.received == "all",
        )
        first = int(prefill.logits[0].argmax())
        t2 = engine.now()
        self.learn(opened, prefill.buffer)
        t3 = engine.now()
        continuation = None
        if wants.received == "decode":
            engine.executor.collect_received(prefill.buffer, prompt, opened.plan)
        if output is not None:
            ids, finish = tuple(output), "forced"
            if stepwise:
                for token in ids:
                    int(engine.executor.extend(prefill.buffer, [token])[-1].argmax())
            elif fed := ids if self.reads_later(node, prompt) else ids[:logits]:
                continuation = engine.executor.extend(prefill.buffer, fed, logits=logits)
        else:
            ids, finish = self._decode(prefill.buffer, first, max_new_tokens, stop_ids)
        t4 = engine.now()
        closed = self.close(opened, ids, prefill.buffer)
        t5 = engine.now()
        return TurnResult(
            node=node.name,
            prompt=prompt,
            output=ids,
            finish=finish,
            first_logits=prefill.logits[0],
            continuation_logits=continuation,
            decisions=opened.plan.decisions,
            accounting=replace(prefill.accounting, reference_tokens=opened.sources.charged),
            times=Times(
                plan=opened.planned - opened.started,
                prefill=t2 - opened.planned,
                build=t3 - t2,
                decode=t4 - t3,
                capture=t5 - t4,
            ),
            first_seen=closed.first_seen,
            holders=closed.holders,
            source_bytes=self.source_bytes,
            reference_bytes=self.reference_bytes,
            buffer=prefill.buffer if keep_buffer else None,
        )

    @torch.inference_mode()
    def open(self, node: Node, prompt: Prompt, force: Mapping[int, bool] | None = None) -> OpenTurn:
        """Let the method plan a turn.

        Raises:
            ValueError: a slot that holds other tokens than this prompt says.
        """
        self._check_ids(prompt)
        engine, method = self.engine, self.engine.method
        turn = Turn(self.request, node.name, self._order[node.name], prompt, force or {})
        sources = _Sources(self, prompt)
        if method.wants.background_reference:
            for segment in prompt.shared():
                sources.reference(segment)
            sources.charged = 0
        started = engine.now()
        plan = method.plan(turn, sources)
        if engine.prefixes is not None:
            plan = engine.prefixes.apply(turn, plan)
        return OpenTurn(node, turn, sources, plan, started, engine.now())

    @torch.inference_mode()
    def learn(self, opened: OpenTurn, buffer: Buffer) -> None:
        """Let method and prefix store learn from the executed prompt, after the first token."""
        engine = self.engine
        engine.method.after_first_token(opened.turn, opened.sources, opened.plan, buffer)
        if engine.prefixes is not None:
            engine.prefixes.learn(opened.turn, buffer, engine.executor)

    @torch.inference_mode()
    def close(self, opened: OpenTurn, output: tuple[int, ...], buffer: Buffer | None) -> Closed:
        """Leave source caches of a buffer that covers prompt and output; None if none are kept."""
        node, prompt = opened.node, opened.turn.prompt
        first_seen, holders = self._note_users(node, prompt, output)
        if buffer is not None and self.engine.method.wants.sources:
            self._keep(node, prompt, output, buffer)
        return Closed(first_seen, holders)

    @property
    def source_bytes(self) -> int:
        """Bytes of the source caches held now."""
        return sum(held.cache.nbytes for held in self._memory.caches.values())

    @property
    def reference_bytes(self) -> int:
        """Bytes of the context-free references held now."""
        return sum(cache.nbytes for cache in self._memory.references.values())

    def held(self, slot: str) -> Held | None:
        """The source cache of a slot, if anybody holds it."""
        return self._memory.caches.get(slot)

    def reference(
        self, slot: str, ids: tuple[int, ...], visuals: tuple[Visual, ...] = ()
    ) -> tuple[SegmentCache, int]:
        """Context-free reference of a slot and the tokens prefilled for it now."""
        prefix = self.engine.reference_prefix
        if slot in self._memory.references:
            return self._memory.references[slot], 0
        parts = (Segment("PF", prefix), Segment("PF", ids, visuals=visuals))
        prompt = Prompt(parts)
        buffer = self.engine.executor.run(prompt, Plan.make(prompt)).buffer
        self._memory.references[slot] = buffer.extract(prompt.rows(1))
        return self._memory.references[slot], len(prompt)

    def _decode(
        self, buffer: ContiguousBuffer, first: int, max_new_tokens: int, stop_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], str]:
        """Greedy decoding on the materialised buffer.

        Every kept token gets its K and V: a sampled stop token is dropped from the output, and at
        the length limit the last sampled token is fed once more without sampling, so that the
        output's source cache covers all of its tokens.
        """
        ids: list[int] = []
        token = first
        while len(ids) < max_new_tokens:
            if token in stop_ids:
                return tuple(ids), "stop"
            ids.append(token)
            token = int(self.engine.executor.extend(buffer, [token])[-1].argmax())
        return tuple(ids), "stop" if token in stop_ids else "length"

    def _check_ids(self, prompt: Prompt) -> None:
        for i in prompt.shared():
            slot, segment = prompt.slot(i), prompt.segments[i]
            content = (segment.ids, segment.visuals)
            if self._memory.content.setdefault(slot, content) != content:
                raise ValueError(f"slot {slot} holds other tokens than this prompt")

    def _note_users(
        self, node: Node, prompt: Prompt, output: tuple[int, ...]
    ) -> tuple[frozenset[int], dict[int, str]]:
        """Which PH were new in this turn, and who held the others; independent of the method."""
        users = self._memory.users
        first = frozenset(i for i in prompt.shared() if prompt.slot(i) not in users)
        holders = {i: users[prompt.slot(i)] for i in prompt.shared() if i not in first}
        users.update({prompt.slot(i): node.name for i in prompt.shared()})
        users[node.out_slot] = node.name
        if output:
            self._memory.content[node.out_slot] = (output, ())
        return first, holders

    def _keep(self, node: Node, prompt: Prompt, output: tuple[int, ...], buffer: Buffer) -> None:
        """Make this turn's caches the sources of later turns; forget what nobody reads again."""
        parts = {prompt.slot(i): prompt.rows(i) for i in prompt.shared()}
        if output:
            parts[node.out_slot] = range(len(prompt), len(prompt) + len(output))
        for slot, rows in parts.items():
            if self._read_later(slot, node):
                exact = buffer.exact(min(rows.stop, len(prompt)))
                self._memory.caches[slot] = Held(buffer.extract(rows), node.name, exact)
            else:
                self._memory.caches.pop(slot, None)

    def reads_later(self, node: Node, prompt: Prompt) -> bool:
        """Whether a later turn reads what this one reads or generates."""
        slots = [node.out_slot, *(prompt.slot(i) for i in prompt.shared())]
        return any(self._read_later(slot, node) for slot in slots)

    def _read_later(self, slot: str, node: Node) -> bool:
        now = self._order[node.name]
        return any(self._order[name] > now for name in self.workflow.consumers(slot))


class _Sources:
    """One turn's view of the shared memory; counts the reference tokens it had to prefill."""

    def __init__(self, session: Session, prompt: Prompt) -> None:
        self._session = session
        self._prompt = prompt
        self.charged = 0

    def held(self, segment: int) -> Held | None:
        """See :class:`~kvcmas.engine.contract.Sources`."""
        return self._session.held(self._prompt.slot(segment))

    def reference(self, segment: int) -> SegmentCache:
        """See :class:`~kvcmas.engine.contract.Sources`."""
        slot, shared = self._prompt.slot(segment), self._prompt.segments[segment]
        cache, tokens = self._session.reference(slot, shared.ids, shared.visuals)
        self.charged += tokens
        return cache
