"""``AscendConnector``: BlendHub in vLLM 0.23, whose connectors neither see its blocks nor name requests that failed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)

from blendhub.vllm.connector import BlendHubConnector
from blendhub.vllm.messages import NULL_BLOCK
from blendhub.vllm.model.platform import Platform
from blendhub.vllm.model.runner import find_caller
from blendhub_ascend.vllm.platform import Ascend

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class AscendConnector(BlendHubConnector):
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._vllms_scheduler: Any = None
        """In the scheduler: vLLM's, which is being made, and makes its manager of blocks only after its connector."""
        if role is KVConnectorRole.SCHEDULER:
            self._vllms_scheduler = find_caller("schedule", "finish_requests")

    @staticmethod
    def _new_platform(runner: Any, config: VllmConfig) -> Platform:
        return Ascend(runner, config)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.bind_kv_cache_manager(self._vllms_scheduler.kv_cache_manager)
        super().set_xfer_handshake_metadata_pp_aware(metadata)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        self.bind_kv_cache_manager(self._vllms_scheduler.kv_cache_manager)
        return super().build_connector_meta(scheduler_output)

    def wait_for_save(self) -> None:
        """Do nothing: vLLM 0.23 does not call this in steps without a forward, so saves begin in ``get_finished``."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not self._worker:
            return None, None
        self._worker.save(self._plan)
        saved, loaded = self._worker.finished()
        return saved or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that were to be loaded: where there is one block table, they say which tokens are missing."""
        blocks: set[int] = set()
        for job in self._worker.take_failed() if self._worker else ():
            start, end = job.decision.start // self._block_size, -(-job.decision.end // self._block_size)
            blocks |= set(job.blocks[0][start:end].tolist())
        # Other requests have the null block, too.
        return blocks - {NULL_BLOCK}
