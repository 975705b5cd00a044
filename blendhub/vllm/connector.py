"""``BlendHubConnector``: vLLM creates one in its scheduler and one in each worker."""

import logging
import threading
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from msgspec import UNSET
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

from blendhub.core.layout import Namespace
from blendhub.framework.hookspecs import EngineInfo
from blendhub.framework.host import PluginHost
from blendhub.framework.observers import Observers
from blendhub.hub.embedded import EmbeddedHub, embedded_hub
from blendhub.outcome.reasons import Why
from blendhub.vllm.messages import HubAddress, StepPlan, WorkerHandshake, WorkerReport
from blendhub.vllm.model_support import permitted, unsupported
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.block_tables import block_tables_of, capacity_line
from blendhub.vllm.scheduler.connector_scheduler import ConnectorScheduler, build_scheduler
from blendhub.vllm.scheduler.prefix_cache import RequestBlocks
from blendhub.vllm.scheduler.startup import StartupFacts, finds_prefixes
from blendhub.vllm.settings import choose_transport, read_settings
from blendhub.vllm.stats import BlendHubMetrics, BlendHubStats
from blendhub.vllm.worker.connector_worker import ConnectorWorker
from blendhub.vllm.worker.worker_start import WorkerStart

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

NOT_HEARD = (
    "another connector of vLLM's MultiConnector has answered in the place of BlendHub's workers; name "
    "BlendHubConnector before it in connectors"
)


class BlendHubConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores and reuses KV through a hub. ``scheduler/`` and ``worker/`` do the work.

    It supports vLLM's hybrid allocator, which has a block table for each group of layers; without the declaration vLLM
    would turn that off, which costs models with attention windows most of their KV capacity.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_where_vllm_logs()
        self._host = PluginHost.discover()
        self._settings = read_settings(
            self._kv_transfer_config.kv_connector_extra_config, self._host, current_platform.device_type
        )
        self._transport = choose_transport(self._settings, self._host, _is_one_process(vllm_config))
        # vLLM computes what cannot be loaded; by default it would fail the request.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._engine_id = str(self._kv_transfer_config.engine_id)
        self._scheduler: ConnectorScheduler | None = None
        self._hub: EmbeddedHub | None = None
        self._observers: Observers | None = None
        self._worker: ConnectorWorker | None = None
        self._block_tables = block_tables_of(kv_cache_config)
        self._start = WorkerStart(vllm_config, self._settings, self._host, self._engine_id)
        self._blocks = RequestBlocks()
        self._unserved: Counter[str] = Counter()
        """The numbers of refused requests, by counter, of a model that is served without reuse."""
        self._reasons: tuple[str, ...] = ()
        # An engine inside a script is shut down only when the script ends. At the time of ``atexit`` Python starts no
        # threads any more, but a hub needs them to close.
        threading._register_atexit(self.shutdown)  # type: ignore[attr-defined]

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._start.register()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Check the model: vLLM calls this after warming the model up and before the first request."""
        connector = get_kv_transfer_group()
        handshake, self._worker = self._start.finish(None if connector is self else connector)
        return handshake

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self._worker:
            self._worker.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and complete before a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: all layers are saved together, after the forward."""

    def wait_for_save(self) -> None:
        """Do nothing: saves begin in ``get_finished``. vLLM 0.23 calls that in every step, this only with tokens."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker:
            assert isinstance(kv_connector_metadata, StepPlan)
            self._worker.begin_step(kv_connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not self._worker:
            return None, None
        self._worker.save(self._plan)
        saved, loaded = self._worker.finished()
        return saved or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._worker.take_failed() if self._worker else set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks() if self._worker else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_report() if self._worker else None

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # In the scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        # vLLM's own method ends the engine if there are pipeline stages; the worker's check refuses them with a reason.
        self.set_xfer_handshake_metadata(dict(enumerate(one for _, one in sorted(metadata.items()))))

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Reach the hub: the workers have checked the model, so the namespace is known."""
        handshakes = [one for _, one in sorted(metadata.items()) if isinstance(one, WorkerHandshake)]
        supports = [one.support for one in handshakes] or [unsupported(NOT_HEARD)]
        worst = next((support for support in supports if not support.layouts), None) or next(
            (support for support in supports if not support.blends), supports[0]
        )
        if worst.layouts:
            worst = permitted(worst, self._settings, self._vllm_config.model_config)
        for reason in worst.reasons:
            log.warning("BlendHub: %s", reason)
        if not worst.layouts:
            self._reasons = worst.reasons
            return
        namespace = Namespace(
            model=self._vllm_config.model_config.model,
            revision=self._vllm_config.model_config.revision or "",
            weights=blake2b(" ".join(one.weights for one in handshakes).encode(), digest_size=16).hexdigest(),
            rotary=handshakes[0].rotary,
            world_size=len(handshakes),
            layout=worst.layouts[0],
            other_layouts=worst.layouts[1:] or UNSET,
            matchers=self._settings.matchers,
        )
        admission = Admission(self._vllm_config, self._settings, worst, namespace)
        facts = StartupFacts(
            settings=self._settings,
            blends=worst.blends,
            role=str(self._kv_transfer_config.kv_role),
            max_model_len=self._vllm_config.model_config.max_model_len,
            namespace=namespace,
            finds_prefixes=finds_prefixes(self._host, self._settings),
            audits=worst.audits,
        )
        self._observers = Observers(self._host.observers())
        self._scheduler = build_scheduler(
            self._vllm_config,
            facts,
            admission,
            self._reach_hub(),
            self._engine_id,
            self._host,
            self._observers,
            self._blocks,
            self._block_tables,
        )
        log.info("BlendHub: %s", capacity_line(self._vllm_config, self._kv_cache_config))
        assert self._settings.device
        self._observers.engine_started(
            EngineInfo(
                engine=self._engine_id,
                model=namespace.model,
                device=self._settings.device.name,
                matchers=tuple(choice.name for choice in self._settings.matchers),
                selector=self._settings.selector.name,
            )
        )

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Keep vLLM's manager of KV blocks. vLLM calls this before the first request, if it lets connectors ask."""
        self._blocks.ask(kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        if self._scheduler:
            self._scheduler.arrived(request)
        else:
            self._unserved[f"refused_{Why.MODEL}"] += 1

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens) if self._scheduler else (0, False)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if not self._scheduler:
            return
        tables = blocks.get_block_ids()
        self._blocks.allocated(request.request_id, tables)
        self._scheduler.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if not self._scheduler:
            return StepPlan()
        self._blocks.scheduled(scheduler_output)
        return self._scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if not self._scheduler:
            return
        if isinstance(connector_output.kv_connector_worker_meta, WorkerReport):
            self._scheduler.process_report(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._blocks.ended(request.request_id)
        if self._scheduler:
            return self._scheduler.ended(request, block_ids)
        return False, {"blendhub": {"reason": "; ".join(self._reasons)}}

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must continue to step: workers commit after the blocks of a request were freed."""
        return self._scheduler is not None and self._scheduler.has_work

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.take_stats() if self._scheduler else BlendHubStats.taken_from(self._unserved)

    def reset_cache(self) -> bool | None:
        return self._scheduler.clear() if self._scheduler else None

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

    def _reach_hub(self) -> HubAddress:
        if self._settings.endpoint:
            return HubAddress(self._settings.endpoint, self._transport)
        assert self._settings.hub.embedded
        self._hub = embedded_hub(self._settings.hub, self._settings.hub.embedded, self._host, self._transport)
        return HubAddress(self._hub.endpoint, self._transport)

    # In both.

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker:
            worker.close()
        scheduler, self._scheduler = self._scheduler, None
        if scheduler:
            scheduler.close()
        observers, self._observers = self._observers, None
        if observers:
            observers.engine_stopping()
        hub, self._hub = self._hub, None
        if hub:
            hub.close()


def _log_where_vllm_logs() -> None:
    ours, theirs = logging.getLogger("blendhub"), logging.getLogger("vllm")
    ours.handlers, ours.propagate = theirs.handlers, False
    ours.setLevel(theirs.level)


def _is_one_process(config: VllmConfig) -> bool:
    """Whether the only worker runs in the scheduler's process."""
    return config.parallel_config.world_size == 1 and config.parallel_config.distributed_executor_backend == "uni"
