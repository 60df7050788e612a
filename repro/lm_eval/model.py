"""``kvcmas-workflow``: every request of lm-eval goes through a multi-agent workflow.

The request's context is the shared query of all agents. For ``generate_until`` the answer is the
last agent's text, cut at the task's stop strings; for ``loglikelihood`` it is the likelihood of the
continuation as the last agent's reply. Requests run one after another, in lm-eval's order, so that
pools grow as they do in `repro accuracy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

import workloads
from kvcmas.engine.adapter import TransformersAdapter
from kvcmas.engine.session import Engine
from kvcmas.errors import UserError
from kvcmas.registry import make_method
from repro.commands.settings import choose_device
from repro.lm_eval.agents import AnyTask
from repro.models import load, resolve
from repro.models.loading import DType
from repro.runners.trajectory import Runner, Trajectory
from workloads.base import Sample
from workloads.chat import ChatFormat

GENERIC = "any"


@register_model("kvcmas-workflow")
class WorkflowLM(LM):
    """A workflow of agents on one model, under one method of cache sharing.

    Args:
        pretrained: registry name of the model, or a Transformers directory.
        method: registered name, or ``module:Class``.
        agents: ``any``, or a benchmark whose agents are to work: gsm8k, mmlu, humaneval.
        max_new_tokens: limit of every turn but the last; that one's is the task's.
        device: ``auto``, or what PyTorch calls it.
        settings: all other arguments are settings of the method.

    Raises:
        UserError: an unknown model, method or setting.
    """

    def __init__(
        self,
        pretrained: str = "smollm2-135m",
        method: str = "kvcmas",
        agents: str = GENERIC,
        max_new_tokens: int = 64,
        dtype: DType = "auto",
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        made = make_method(method, settings)
        workload = AnyTask() if agents == GENERIC else workloads.get(agents)
        # lm-eval's command line offers cuda:0 unless told otherwise, wherever it runs.
        offered = device if torch.cuda.is_available() or device != "cuda:0" else None
        model, tokenizer = load(
            resolve(pretrained), dtype=dtype, device=choose_device(offered or "auto")
        )
        eos = model.generation_config.eos_token_id
        chat = ChatFormat.from_tokenizer(tokenizer, [eos] if isinstance(eos, int) else eos or [])
        bos = tokenizer.bos_token_id
        prefix = (bos,) if isinstance(bos, int) else tuple(sorted(chat.stop_ids)[:1])
        engine = Engine(TransformersAdapter(model), made, reference_prefix=prefix)
        self._runner = Runner(engine, workload, chat, max_new_tokens)
        self._requests = 0
        self._shared = self._executed = 0

    @property
    def rho(self) -> float | None:
        """Entry reuse ratio over all requests so far; None if nothing could be reused."""
        return 1 - self._executed / self._shared if self._shared else None

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The last agent's text for each context, cut at the first stop string.

        Raises:
            UserError: a request that asks for sampling; decoding is greedy.
        """
        answers = []
        for request in tqdm(requests, desc="workflows", disable=disable_tqdm):
            context, options = request.args
            text = _cut(self._answer(context, options), options.get("until") or ())
            self.cache_hook.add_partial("generate_until", request.args, text)
            answers.append(text)
        return answers

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Log-likelihood (nats) of each continuation, and whether greedy decoding gives it.

        The agents before the last one run once for all continuations of a context. A reply starts
        a message, so white space that joins a continuation to its context is dropped.
        """
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        groups = list(_by_context(requests))
        for context, indices in tqdm(groups, desc="workflows", disable=disable_tqdm):
            replies = [requests[i].args[1].lstrip() for i in indices]
            trajectory = self._run(replace(self._runner, final_tokens=1), context, replies)
            for i, likelihood in zip(indices, trajectory.likelihoods, strict=True):
                found[i] = (likelihood.nats, likelihood.greedy)
                self.cache_hook.add_partial("loglikelihood", requests[i].args, found[i])
        return found

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Not there: agents answer, they do not continue a document.

        Raises:
            UserError: always.
        """
        raise UserError("perplexity tasks have no question for agents to work on")

    def _answer(self, context: str, options: Mapping[str, Any]) -> str:
        if options.get("do_sample") and options.get("temperature"):
            raise UserError("the workflow decodes greedily; set do_sample to false")
        limit = options.get("max_gen_toks") or options.get("max_tokens")
        runner = replace(self._runner, final_tokens=limit)
        return self._run(runner, context).steps[-1].text

    def _run(self, runner: Runner, context: str, replies: Sequence[str] = ()) -> Trajectory:
        self._requests += 1
        sample = Sample(f"lm-eval-{self._requests}", context, "", {"entry_point": ""})
        trajectory = runner.run(sample, replies=replies)
        for step in trajectory.steps:
            for segment, entries in step.result.accounting.shared.items():
                if segment not in step.result.first_seen:
                    self._shared += entries.total
                    self._executed += entries.executed
        return trajectory


def _by_context(requests: Sequence[Instance]) -> Iterator[tuple[str, list[int]]]:
    """Contexts in the order of their first request, with the indices of their requests."""
    groups: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.args[0], []).append(index)
    yield from groups.items()


def _cut(text: str, until: str | Sequence[str]) -> str:
    stops = [until] if isinstance(until, str) else until
    ends = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
