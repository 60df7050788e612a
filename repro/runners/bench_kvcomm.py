"""`repro bench kvcomm`: whole trajectories on layouts on which the official KVComm was measured.

The system prompt is cached for both sides. Prompts are ``system, query, (glue, output of every
earlier agent), tail``. The official numbers are those of its public code on a CPU with two anchors,
its input prefill, gate and pool copy counted (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from baselines.kvcomm import KVComm
from baselines.nonshared import NonShared
from kvcmas.engine.adapter import ModelSpec, TransformersAdapter
from kvcmas.engine.segments import Prompt, pf, ph
from kvcmas.engine.session import Engine
from kvcmas.engine.workflow import QUERY, Node, Workflow, fully_connected
from kvcmas.method.kvcmas import KVCMAS
from repro.runners.bench_parts import Draw, Step, interleaved
from repro.runners.bench_turn import Bench
from repro.runners.memory_model import layout_turns, pool_bytes
from results.goals import BenchRow
from traces.generator import Lengths
from workloads.procedural import problems

SYSTEM, GLUE, TAIL = 512, 16, 16
POOL, SMALL_POOL, PEER_POOL = 10, 2, 2
# First tokens equal to dense that the official code reached over all layouts.
PEER_FIRST_TOKENS = 28 / 39


@dataclass(frozen=True)
class Layout:
    """Tokens of the shared span, agents, tokens each generates, goals at V=10 and V=2."""

    shared: int
    agents: int
    output: int
    goal: float | None = None
    small_goal: float | None = None

    @property
    def graph(self) -> Workflow:
        """Every agent reads all earlier ones."""
        return fully_connected(self.agents)

    @property
    def lengths(self) -> Lengths:
        """Tokens of every part."""
        return Lengths(SYSTEM, self.shared, 0, GLUE, TAIL, self.output)


LAYOUTS: Mapping[str, Layout] = {
    "1k": Layout(1024, 4, 128, 2.4, 3.2),
    "2k": Layout(2048, 3, 32, 2.0),
    "4k": Layout(4096, 3, 32, 2.2),
}


def bench_kvcomm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    *,
    requests: int = 0,
    repeats: int = 3,
    seed: int = 0,
    on_step: Step = lambda step: None,
) -> tuple[BenchRow, ...]:
    """Sum of TTFT over a trajectory, dense against KVCMAS, in turn; pool bytes; first tokens.

    The first turn is dense on both sides; gate, weights and correction count. With ``requests`` so
    many more are run on text, with real anchors, and accepted calls compared with dense.

    Raises:
        UserError: the context is longer than the model allows.
    """
    draw, spec = Draw(seed), TransformersAdapter(model).spec
    on_step("drawing anchors")
    dense = NonShared()
    turns = [
        Bench.of(model, prompt, node.name, draw, first=not i, cached=(0,))
        for i, (node, prompt) in enumerate(_random_prompts(layout, spec, draw))
    ]
    pools = {v: [turn.kvcmas(v, draw) for turn in turns] for v in (POOL, SMALL_POOL)}

    def trajectory(anchors: int) -> float:
        return sum(turn.ttft(ours) for turn, ours in zip(turns, pools[anchors], strict=True))

    seconds = interleaved(
        {
            "dense": lambda: sum(turn.ttft(dense) for turn in turns),
            f"V={POOL}": lambda: trajectory(POOL),
            f"V={SMALL_POOL}": lambda: trajectory(SMALL_POOL),
        },
        repeats,
        on_step,
    )
    name = f"{layout.shared} shared, {layout.agents} agents, {layout.output} out"
    rows = [
        BenchRow.paired(
            f"dense / KVCMAS trajectory, V={anchors}, {name}",
            seconds["dense"],
            seconds[f"V={anchors}"],
            goal,
            at_least=True,
        )
        for anchors, goal in ((POOL, layout.goal), (SMALL_POOL, layout.small_goal))
    ]
    rows += [_pool(layout, spec, base) for base in ("per_edge", "shared")]
    if requests:
        del turns, pools
        rows.append(_first_tokens(model, tokenizer, layout, requests, on_step))
    return tuple(rows)


def _random_prompts(layout: Layout, spec: ModelSpec, draw: Draw) -> Iterator[tuple[Node, Prompt]]:
    def ids(tokens: int) -> tuple[int, ...]:
        return draw.ids(spec.vocab, tokens)

    query, outputs = ids(layout.shared), [ids(layout.output) for _ in range(layout.agents)]
    for node in layout.graph.nodes:
        segments = [pf(ids(SYSTEM)), ph(QUERY, query)]
        for parent, output in zip(node.parents, outputs, strict=False):
            segments += [pf(ids(GLUE)), ph(layout.graph[parent].out_slot, output)]
        yield node, Prompt((*segments, pf(ids(TAIL))))


def _pool(layout: Layout, spec: ModelSpec, base: Literal["per_edge", "shared"]) -> BenchRow:
    """Calculated; tests of the calculator compare it with what real pools hold."""
    turns = layout_turns(layout.lengths, layout.graph)
    ours = pool_bytes(KVCMAS(capacity=POOL, base=base), turns, spec).total
    theirs = pool_bytes(KVComm(capacity=PEER_POOL), turns, spec).total
    name = f"pool bytes at V={POOL}, base={base} / KVComm's at {PEER_POOL} anchors"
    goal = 1.0 if base == "per_edge" and layout.goal is not None else None
    return BenchRow(name=name, values=(ours / theirs,), goal=goal)


def _first_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    requests: int,
    on_step: Step,
) -> BenchRow:
    """Share of accepted calls whose first token is dense's; dense writes the outputs of both."""
    adapter, text = TransformersAdapter(model), _Text(tokenizer, layout)
    dense, ours = Engine(adapter, NonShared()), Engine(adapter, KVCMAS(tau=1.0, capacity=POOL))
    equal: list[float] = []
    for n in range(POOL + requests):
        warm = n < POOL
        on_step(f"anchor {n + 1} of {POOL}" if warm else f"request {n - POOL + 1} of {requests}")
        session = ours.session(layout.graph, f"request-{n}")
        beside = session if warm else dense.session(layout.graph, f"request-{n}")
        outputs: dict[str, tuple[int, ...]] = {}
        for node in layout.graph.nodes:
            prompt = text.prompt(n, node, outputs)
            refused = dict.fromkeys(prompt.shared(), False)
            exact = beside.run(node, prompt, max_new_tokens=layout.output, force=refused)
            outputs[node.out_slot] = exact.output
            if warm:
                continue
            turn = session.run(node, prompt, max_new_tokens=0, output=exact.output, logits=0)
            if all(decision.action == "correct" for decision in turn.decisions):
                equal.append(float(exact.first_logits.argmax() == turn.first_logits.argmax()))
    name = f"first token equal to dense, {len(equal)} accepted calls"
    share = sum(equal) / len(equal)
    return BenchRow(name=name, values=(share,), goal=PEER_FIRST_TOKENS, at_least=True)


class _Text:
    """Prompts of word problems: another query for every request, the same agents."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> None:
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(
            text, add_special_tokens=False
        )
        self._layout = layout
        self._systems = {
            node.name: self._cut(f"You are {node.name}. Solve the problems.", SYSTEM, node.agent)
            for node in layout.graph.nodes
        }

    def prompt(self, n: int, node: Node, outputs: Mapping[str, tuple[int, ...]]) -> Prompt:
        """Prompt of ``node`` in request ``n``."""
        query = self._cut("Problems:", self._layout.shared, 1000 + n)
        segments = [pf(self._systems[node.name]), ph(QUERY, query)]
        for parent in node.parents:
            slot = self._layout.graph[parent].out_slot
            segments += [pf(self._encode(f"\n\n{parent} wrote:\n")), ph(slot, outputs[slot])]
        return Prompt((*segments, pf(self._encode(f"\n\nAnswer of {node.name}:\n"))))

    def _cut(self, begin: str, tokens: int, seed: int) -> tuple[int, ...]:
        """``begin`` and problems after it, exactly ``tokens`` long."""
        ids = self._encode(begin)
        batch = 0
        while len(ids) < tokens:
            drawn = problems("test", difficulty=3, count=8, seed=seed + 100_000 * batch)
            ids += self._encode("".join(f"\n\n{problem.question}" for problem in drawn))
            batch += 1
        return tuple(ids[:tokens])
