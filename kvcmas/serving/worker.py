"""vLLM's worker for this platform, plus one call: the connector is given the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from kvcmas.engine.contract import State
from kvcmas.errors import UserError
from kvcmas.serving.config import ServingConfig
from kvcmas.serving.connector import KVCMASConnector
from kvcmas.serving.desk import Desk
from kvcmas.serving.report import TurnReport

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class Worker(PlatformWorker):
    """For ``--worker-cls``; the methods beyond vLLM's are for ``collective_rpc``.

    The same for both of vLLM's model runners: either has ``get_model``.
    """

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """See vLLM; afterwards caches are allocated and the connector exists."""
        super().initialize_from_config(kv_cache_config)
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            if isinstance(connector, KVCMASConnector):
                connector.bind(self.get_model())

    def configure_serving(self, config: dict[str, Any]) -> None:
        """Serve another method from now on, with empty pools.

        Raises:
            UserError: turns are under way, or illegal settings.
        """
        self._desk().configure(ServingConfig.parse(config))

    def serving_reports(self) -> tuple[list[TurnReport], float]:
        """Reports and the seconds spent after first tokens, both since the last call."""
        desk = self._desk()
        reports, desk.reports = desk.reports, []
        seconds, desk.after_seconds = desk.after_seconds, 0.0
        return reports, seconds

    def serving_stats(self) -> dict[str, int]:
        """What the plug-in holds."""
        return self._desk().stats

    def serving_state(self, tenant: str) -> State:
        """What the method has learned."""
        return self._desk().engine(tenant).state()

    def load_serving_state(self, state: State, tenant: str) -> None:
        """Restore :meth:`serving_state`."""
        self._desk().engine(tenant).load_state(state)

    def _desk(self) -> Desk:
        connector = get_kv_transfer_group()
        if not isinstance(connector, KVCMASConnector) or connector.desk is None:
            raise UserError("this engine runs without the KVCMAS connector")
        return connector.desk
