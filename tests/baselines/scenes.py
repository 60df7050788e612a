"""One turn with two held PH beside its dense truth: what the methods' invariants are checked on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcmas.engine.cache import Buffer, Origin, SegmentCache
from kvcmas.engine.contract import Held, Method, Plan, Turn
from kvcmas.engine.executor import Executor, Prefill
from kvcmas.engine.segments import Prompt, pf, ph
from tests.workflows import FixedSources, random_ids

CLOSE = 2e-5  # fp32, values of order 1
LAYERS = 4  # of both tiny models
Q, OUT = 1, 3  # segment indices of the two PH


@dataclass(frozen=True)
class Scene:
    """A target turn: PF, PH ``q``, PF, PH ``out0``, PF; both PH held by another agent.

    ``q`` was prefilled there, ``out0`` decoded, under another system text. Sources hold every
    residual row and the received attention. ``source`` is the prompt they were made with.
    """

    executor: Executor
    turn: Turn
    sources: FixedSources
    dense: Prefill
    source: Prompt

    @property
    def prompt(self) -> Prompt:
        return self.turn.prompt

    def serve(self, method: Method) -> tuple[Plan, Prefill]:
        """The target turn under ``method``."""
        plan = method.plan(self.turn, self.sources)
        wants = method.wants
        run = self.executor.run(
            self.prompt,
            plan,
            hidden_layers=wants.hidden_layers,
            received=wants.received is not None,
        )
        return plan, run

    def error(self, run: Prefill) -> float:
        """Relative Frobenius error of K and V over the whole prompt."""
        parts = ((run.buffer.k, self.dense.buffer.k), (run.buffer.v, self.dense.buffer.v))
        return sum(float((a - b).norm() / b.norm()) for a, b in parts) / 2

    def shared_rows(self) -> Tensor:
        """Rows of both PH that are not the last row of the prompt."""
        rows = [row for i in (Q, OUT) for row in self.prompt.rows(i) if row < len(self.prompt) - 1]
        return torch.tensor(rows)

    def with_cache(self, segment: int, cache: SegmentCache) -> Scene:
        """The same turn with another source for one PH."""
        held = {**self.sources.caches}
        held[segment] = replace(held[segment], cache=cache)
        return replace(self, sources=FixedSources(held))

    def forced(self, force: dict[int, bool]) -> Scene:
        """The same turn with forced decisions."""
        return replace(self, turn=replace(self.turn, force=force))


def make_scene(
    executor: Executor,
    seed: int = 0,
    *,
    same_context: bool = False,
    system: int = 14,
    query: int = 24,
    output: int = 12,
    tail: int = 5,
) -> Scene:
    """A scene of random ids.

    Args:
        same_context: take the sources from the dense run of the target prompt itself.
        system: length of the target's first PF.
        tail: length of the last PF; 0 ends the prompt with the PH ``out0``.
    """
    base = 100 * seed
    q, out = random_ids(base, query), random_ids(base + 1, output)
    target = Prompt(
        (
            pf(random_ids(base + 2, system)),
            ph("q", q),
            pf(random_ids(base + 3, 6)),
            ph("out0", out),
            pf(random_ids(base + 4, tail)),
        )
    )
    source = Prompt((pf(random_ids(base + 5, 9)), ph("q", q), pf(random_ids(base + 6, 4))))
    layers = range(executor.model.spec.layers)
    dense = executor.run(target, Plan.make(target), hidden_layers=layers, received=True)
    if same_context:
        caches = {i: dense.buffer.extract(target.rows(i)) for i in (Q, OUT)}
    else:
        run = executor.run(
            source, Plan.make(source), new_tokens=output, hidden_layers=layers, received=True
        )
        for token in out:
            executor.extend(run.buffer, [token])
        rows = range(len(source), len(source) + output)
        caches = {Q: run.buffer.extract(source.rows(1)), OUT: run.buffer.extract(rows)}
    held = {i: Held(cache, "A0", True) for i, cache in caches.items()}
    return Scene(executor, Turn("r0", "A1", 1, target), FixedSources(held), dense, source)


def executed(buffer: Buffer) -> Tensor:
    """``[layers, rows]`` booleans: which entries the model wrote."""
    return buffer.origin == Origin.EXECUTED


def assert_same_kv(got: Buffer, expected: Buffer, atol: float = CLOSE) -> None:
    torch.testing.assert_close(got.k, expected.k, atol=atol, rtol=0)
    torch.testing.assert_close(got.v, expected.v, atol=atol, rtol=0)
