"""The KV connector that vLLM loads: it passes on between vLLM and the two sides of the plug-in.

``--kv-transfer-config '{"kv_connector": "KVCMASConnector", "kv_role": "kv_both",
"kv_connector_module_path": "kvcmas.serving.connector", "kv_connector_extra_config": {...}}'`` with
the settings of :class:`~kvcmas.serving.config.ServingConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.request import RequestStatus

from kvcmas.engine.cache import Buffer
from kvcmas.errors import UserError
from kvcmas.serving.adapter import VllmAdapter
from kvcmas.serving.admission import Admission
from kvcmas.serving.config import ServingConfig
from kvcmas.serving.desk import Desk
from kvcmas.serving.messages import Begin, Drop, End, StepWork
from kvcmas.serving.paged import PagedBuffer, PagedCache

WORKER = "kvcmas.serving.worker.Worker"


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's work, from scheduler to worker."""

    work: StepWork = field(default_factory=StepWork)


class KVCMASConnector(KVConnectorBase_V1):
    """See the module; one instance on the scheduler's side, one in the worker.

    Raises:
        UserError: a server set up in a way that would give wrong results, or bad settings.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check(vllm_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._config = ServingConfig.parse(transfer.kv_connector_extra_config)
        self._tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.admission: Admission | None = None
        self.desk: Desk | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.admission = Admission(self._config, self._tokens)
        self._pending: list[End | Drop] = []
        self._native: list[Begin] = []
        self._done: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """A source cache that is never delivered costs a dense turn, nothing else."""
        return False

    # The scheduler's side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class; rows are written within the step (no asynchronous load)."""
        assert self.admission is not None
        rows = self.admission.external_rows(
            request.request_id,
            request.kv_transfer_params,
            request.prompt_token_ids,
            bool(request.mm_features),
        )
        return rows, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        assert self.admission is not None
        self.admission.scheduled(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See the base class."""
        assert self.admission is not None
        return StepMetadata(self.admission.take())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class; the blocks stay until the worker has taken what it needs."""
        assert self.admission is not None
        stopped = request.status == RequestStatus.FINISHED_STOPPED
        complete = stopped or request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        output = list(request.output_token_ids)
        answer = self.admission.answer(request.request_id)
        held = self.admission.finished(
            request.request_id,
            output[:-1] if stopped else output,
            request.num_computed_tokens,
            block_ids,
            complete,
        )
        return held, answer

    # The worker's side

    def bind(self, model: Any) -> None:
        """Make the worker's side: the model is loaded and its caches are allocated.

        Raises:
            UserError: a model or cache that is not supported.
        """
        adapter = VllmAdapter(model, self._vllm_config, self._tokens)
        cache = PagedCache(adapter.attention, self._vllm_config, adapter.rope)

        def pages(blocks: Sequence[int], rows: int) -> Buffer:
            return PagedBuffer(cache, blocks, rows)

        self.desk = Desk(adapter, pages, self._config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Carry out the plans of this step's requests, before vLLM executes their other rows.

        What ended in their workflows is taken first. Everything else waits until after the forward.
        (Where no request of a step has external rows, vLLM calls this after the forward.)
        """
        assert self.desk is not None
        work = self._work()
        self._pending += work.ends
        self._native += [begin for begin in work.begins if not begin.stop]
        loads = [begin for begin in work.begins if begin.stop]
        if not loads:
            return
        flows = {(begin.params.tenant, begin.params.request) for begin in loads}
        waiting: list[End | Drop] = []
        for end in self._pending:
            if self.desk.flow_of(end.key) in flows:
                self._end(end)
            else:
                waiting.append(end)
        self._pending = waiting
        for begin in loads:
            self.desk.begin(begin)

    def wait_for_save(self) -> None:
        """After the forward: take what has ended, then plan the turns that vLLM executes alone."""
        assert self.desk is not None
        for end in self._pending:
            self._end(end)
        for begin in self._native:
            self.desk.begin(begin)
        self._pending, self._native = [], []

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks are free now."""
        done, self._done = self._done, set()
        return done or None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that even a dense execution could not fill."""
        assert self.desk is not None
        failed, self.desk.failed_blocks = self.desk.failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are written before the forward."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: rows are read when a request has ended."""

    def _end(self, end: End | Drop) -> None:
        assert self.desk is not None
        if isinstance(end, Drop):
            self.desk.drop(end)
            return
        self.desk.end(end)
        if end.held:
            self._done.add(end.key)

    def _work(self) -> StepWork:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.work


def _check(config: VllmConfig) -> None:
    if config.cache_config.enable_prefix_caching:
        raise UserError(
            "corrected blocks must not enter vLLM's prefix cache; start it with"
            " --no-enable-prefix-caching"
        )
    if config.scheduler_config.async_scheduling:
        raise UserError("start vLLM with --no-async-scheduling; the plug-in reads finished steps")
    if config.parallel_config.worker_cls != WORKER:
        raise UserError(
            f"start vLLM with --worker-cls {WORKER}; a connector is not given the model"
        )
