"""``BlendHubConnector``: vLLM creates one in its scheduler and one in each worker."""

import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.platforms import current_platform

from blendhub.framework.host import PluginHost
from blendhub.vllm.messages import Handshake, StepPlan, WorkerProof, WorkerReport
from blendhub.vllm.model.platform import Platform
from blendhub.vllm.model_support import neighbours_of
from blendhub.vllm.scheduler.blocks.block_tables import block_tables_of
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.side import NotServed, SchedulerSide
from blendhub.vllm.scheduler_start import READY_S, SchedulerStart
from blendhub.vllm.settings import choose_transport, read_settings
from blendhub.vllm.text_options import with_token_ids
from blendhub.vllm.watching.metrics import BlendHubMetrics
from blendhub.vllm.watching.stats import BlendHubStats
from blendhub.vllm.worker.side import WorkerSide
from blendhub.vllm.worker.start.worker_start import WorkerStart

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class BlendHubConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores and reuses KV through a hub. ``scheduler/`` and ``worker/`` do the work.

    It supports vLLM's hybrid allocator, which has a block table for each group of layers; without the declaration vLLM
    would turn that off, which costs models with attention windows most of their KV capacity.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_where_vllm_logs()
        host, extra_config = PluginHost.discover(), self._kv_transfer_config.kv_connector_extra_config
        settings = read_settings(extra_config, host, current_platform.device_type)
        transport = choose_transport(settings, host, _is_one_process(vllm_config))
        # vLLM computes what cannot be loaded; by default it would fail the request.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._blocks = EngineBlocks(block_tables_of(kv_cache_config))
        self._scheduler: SchedulerSide = NotServed()
        self._unchecked: WorkerStart | None = None
        """In a worker, until it has checked its model."""
        self._worker = WorkerSide()
        self._proof: WorkerProof | None = None
        """What the check has found, until it is reported."""
        if role is KVConnectorRole.SCHEDULER:  # only the namespace, which the scheduler registers, names matchers
            settings = with_token_ids(settings, host, vllm_config.model_config)
            self._scheduler = SchedulerStart(vllm_config, settings, host, transport, self._blocks, kv_cache_config)
        else:
            engine_id = str(self._kv_transfer_config.engine_id)
            self._unchecked = WorkerStart(vllm_config, settings, host, engine_id, self._new_platform)
        # An engine inside a script is shut down only when the script ends. At the time of ``atexit`` Python starts no
        # threads any more, but a hub needs them to close.
        threading._register_atexit(self.shutdown)  # type: ignore[attr-defined]

    # In a worker.

    @staticmethod
    def _new_platform(runner: Any, config: VllmConfig) -> Platform:
        """What forwards need that depends on whose model runner serves the model."""
        # The version of vLLM that vllm-ascend needs lacks names that this module imports.
        from blendhub.vllm.model.upstream import Upstream

        return Upstream()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._unchecked:
            self._unchecked.register()

    def get_handshake_metadata(self) -> Handshake | None:
        """Check the model: vLLM calls this after warming the model up and before the first request.

        vLLM's MultiConnector would show a handshake to all other connectors, of which some end the engine if it is not
        theirs. Beside them, the proof goes with the first report.
        """
        self._check_model()
        if self._proof is None or get_kv_transfer_group() is not self:
            return None
        proof, self._proof = self._proof, None
        return Handshake(proof)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: all layers are saved together, after the forward."""

    def wait_for_save(self) -> None:
        """Begin the step's saves. vLLM waits for nothing here, and calls this behind its drafter, if it has one."""
        self._worker.save(self._plan)

    def unregister_kv_caches(self) -> None:
        """End all copies: vLLM unmaps its KV cache. It says so from version 0.33 on."""
        self._worker.detach()

    def restore_kv_caches(self) -> None:
        """Copy again: vLLM has mapped its KV cache to the same addresses."""
        self._worker.attach()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # Behind a connector that answers in its place, MultiConnector does not ask BlendHub for a handshake.
        self._check_model()
        assert isinstance(kv_connector_metadata, StepPlan)
        self._worker.begin_step(kv_connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        """Say which transfers have ended."""
        # The version of vLLM that vllm-ascend needs has no such results, and never calls this.
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        saved, loaded = self._worker.finished()
        return KVConnectorTransferResults(saved, loaded, {job.request for job in self._worker.take_failed()})

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._worker.take_report()
        proof, self._proof = self._proof, None
        if proof:
            report = report or WorkerReport()
            report.proofs = {proof.rank: proof}
        return report

    def _check_model(self) -> None:
        start, self._unchecked = self._unchecked, None
        if start:
            self._proof, worker = start.finish(neighbours_of(self, get_kv_transfer_group()))
            self._worker = worker or self._worker

    @property
    def _plan(self) -> StepPlan:
        return cast(StepPlan, self._get_connector_metadata())

    # In the scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Keep vLLM's manager of KV blocks. vLLM calls this before the first request."""
        self._blocks.manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """End the start, before vLLM says that it is ready: the first request waits for nothing."""
        proofs = {shake.proof.rank: shake.proof for shake in metadata.values() if isinstance(shake, Handshake)}
        if proofs:
            self._scheduler.process_report(WorkerReport(proofs=proofs))
            self._scheduler = self._scheduler.successor(READY_S)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        plan = self._scheduler.plan(scheduler_output)
        self._scheduler = self._scheduler.successor()
        return plan

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler.process_report(report)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.ended(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.ended(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must continue to step: the start takes some, and workers commit after a request has ended."""
        return self._scheduler.has_work

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.take_stats()

    def reset_cache(self) -> None:
        self._scheduler.clear()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return BlendHubStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return BlendHubMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Always false. With CUDA graphs vLLM calls this long before it loads the model: wrong settings end its start
        here."""
        read_settings(extra_config, PluginHost.discover(), current_platform.device_type)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Return false: a dropped save only causes a later cache miss."""
        return False

    # In both.

    def shutdown(self) -> None:
        worker, scheduler = self._worker, self._scheduler
        self._worker, self._scheduler = WorkerSide(), NotServed()
        worker.close()
        scheduler.close()


def _log_where_vllm_logs() -> None:
    ours, theirs = logging.getLogger("blendhub"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.level)


def _is_one_process(config: VllmConfig) -> bool:
    """Whether the only worker runs in the scheduler's process."""
    return config.parallel_config.world_size == 1 and config.parallel_config.distributed_executor_backend == "uni"
