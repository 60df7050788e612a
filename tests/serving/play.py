"""Workflows on a vLLM host, beside the same on the Transformers engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcmas.engine.adapter import ModelAdapter
from kvcmas.engine.segments import Prompt
from kvcmas.engine.session import Engine, TurnResult
from kvcmas.engine.workflow import QUERY, Node, Workflow
from kvcmas.registry import make_method
from kvcmas.serving.host import Emitted, Host
from kvcmas.serving.params import TurnParams
from kvcmas.serving.report import TurnReport
from tests.workflows import Ids, agent_prompt, random_ids

OUTPUT = 20


@dataclass(frozen=True)
class Pair:
    host: Host
    adapter: ModelAdapter


@dataclass(frozen=True)
class Served:
    """One turn on the host: ``logprobs [tokens, vocab]``."""

    params: TurnParams
    prompt: Prompt
    tokens: Ids
    finish: str | None
    logprobs: Tensor
    cached: int
    report: TurnReport | None = None


@dataclass
class Driver:
    """Submits turns, steps the host, and puts together what comes back."""

    host: Host
    vocab: int
    _open: dict[str, tuple[TurnParams | None, Prompt]] = field(default_factory=dict)
    _emitted: dict[str, list[Emitted]] = field(default_factory=dict)
    reports: list[TurnReport] = field(default_factory=list)

    def submit(self, prompt: Prompt, params: TurnParams | None = None, **options: Any) -> str:
        options.setdefault("logprobs", self.vocab)
        request = self.host.submit(prompt.ids, params, **options)
        self._open[request] = (params, prompt)
        return request

    def step(self) -> None:
        step = self.host.step()
        for emitted in step.emitted:
            self._emitted.setdefault(emitted.request, []).append(emitted)
        self.reports += step.reports

    def settle(self) -> dict[str, Served]:
        """Everything that finished, by request id."""
        while self.host.busy:
            self.step()
        served = {}
        for request, (params, prompt) in self._open.items():
            parts = self._emitted.pop(request, [])
            tokens = tuple(token for part in parts for token in part.token_ids)
            rows = [row for part in parts for row in part.logprobs or ()]
            logprobs = torch.full((len(rows), self.vocab), torch.nan)
            for at, row in enumerate(rows):
                logprobs[at, list(row)] = torch.tensor(list(row.values()))
            served[request] = Served(
                params,
                prompt,
                tokens,
                parts[-1].finish if parts else None,
                logprobs,
                parts[-1].cached_tokens if parts else 0,
                self._report(params),
            )
        self._open.clear()
        return served

    def _report(self, params: TurnParams | None) -> TurnReport | None:
        for report in self.reports:
            if params and (report.tenant, report.request, report.node) == (
                params.tenant,
                params.request,
                params.node,
            ):
                self.reports.remove(report)
                return report
        return None


def driver(pair: Pair) -> Driver:
    return Driver(pair.host, pair.adapter.spec.vocab)


Force = Callable[[int], bool | None]


def forced(prompt: Prompt, accept: bool | None) -> Mapping[int, bool]:
    return {} if accept is None else dict.fromkeys(prompt.shared(), accept)


def request_texts(n: int, length: int = 60) -> dict[str, Ids]:
    return {QUERY: random_ids(500 + n, length)}


def output_of(n: int, node: Node) -> Ids:
    return random_ids(900 + 10 * n + node.agent, OUTPUT)


def play_host(
    pair: Pair,
    workflow: Workflow,
    n: int,
    accept: bool | None = None,
    *,
    tail: int = 5,
    length: int = 60,
    tenant: str = "",
) -> list[Served]:
    """Request number ``n`` through all turns, replayed outputs, one turn at a time."""
    texts, turns, drive = request_texts(n, length), [], driver(pair)
    for node in workflow.nodes:
        prompt = agent_prompt(workflow, node, texts, tail=tail)
        output = output_of(n, node)
        params = TurnParams.of(
            workflow,
            node,
            f"n{n}",
            prompt,
            force=forced(prompt, accept),
            output=output,
            tenant=tenant,
        )
        request = drive.submit(prompt, params)
        turns.append(drive.settle()[request])
        texts[node.out_slot] = output
    return turns


def play_reference(
    engine: Engine,
    workflow: Workflow,
    n: int,
    accept: bool | None = None,
    *,
    tail: int = 5,
    length: int = 60,
) -> list[TurnResult]:
    """The same on the Transformers engine."""
    session, texts, turns = engine.session(workflow, f"n{n}"), request_texts(n, length), []
    for node in workflow.nodes:
        prompt = agent_prompt(workflow, node, texts, tail=tail)
        output = output_of(n, node)
        turns.append(
            session.run(node, prompt, max_new_tokens=1, output=output, force=forced(prompt, accept))
        )
        texts[node.out_slot] = output
    return turns


def reference_engine(pair: Pair, method: str, settings: Mapping[str, Any]) -> Engine:
    return Engine(pair.adapter, make_method(method, settings))


def distance(served: Served, result: TurnResult) -> float:
    """Largest difference of first-token logprobs."""
    expected = torch.log_softmax(result.first_logits.float(), dim=-1)
    return float((served.logprobs[0] - expected).abs().max())
