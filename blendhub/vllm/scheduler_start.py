"""The start of the connector in vLLM's scheduler: the workers' first report, and then the hub."""

import logging
import threading
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from hashlib import blake2b

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from blendhub.core.layout import Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.hookspecs import EngineInfo
from blendhub.framework.host import PluginHost
from blendhub.framework.observers import Observers
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import HubAddress, HubPlace, WorkerProof, WorkerReport
from blendhub.vllm.model_support import ModelSupport, unsupported
from blendhub.vllm.own_hub import start_own_hub
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blocks.block_tables import block_tables_of, capacity_line
from blendhub.vllm.scheduler.blocks.request_blocks import RequestBlocks
from blendhub.vllm.scheduler.connector_scheduler import ConnectorScheduler, build_scheduler
from blendhub.vllm.scheduler.load_scheduler import LOOKUP_WAIT_S
from blendhub.vllm.scheduler.startup import StartupFacts, finds_prefixes
from blendhub.vllm.settings import Settings

log = logging.getLogger(__name__)

MOST_STEPS = 64
"""The step in whose plan the workers' first report must be known. vLLM plans only a few steps ahead of the reports."""

READY_S = 30.0
"""How long vLLM waits for the hub before it says that it is ready. If the hub takes longer, requests wait for it."""

NOT_HEARD = "the workers have not reported the checks of their model"


class SchedulerStart:
    """The time from vLLM's start until requests can be served; for the scheduler's thread.

    The workers have checked the model when their handshake or, beside other connectors, their first report arrives;
    only then the hub is started or reached, in a thread, because a model that is served without reuse needs none.
    Requests that arrive earlier wait.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: Settings,
        host: PluginHost,
        transport: PluginChoice,
        engine_id: str,
        blocks: RequestBlocks,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        self.waiting: dict[str, Request] = {}
        """The requests that have arrived."""
        self.reports: list[WorkerReport] = []
        """The reports that have arrived: workers do not repeat what they report."""
        self.reasons: tuple[str, ...] = ()
        """Why nothing is reused; empty while that is not known, and if something is reused."""
        self._config = config
        self._settings = settings
        self._host = host
        self._transport = transport
        self._engine_id = engine_id
        self._blocks = blocks
        self._kv_cache_config = kv_cache_config
        self._n_ranks = config.parallel_config.tensor_parallel_size
        self._n_steps = 0
        self._scheduler: Future[ConnectorScheduler] | None = None

    @property
    def is_over(self) -> bool:
        return bool(self.reasons) or (self._scheduler is not None and self._scheduler.done())

    def result(self) -> ConnectorScheduler | None:
        """The scheduler side, which serves requests from now on; None if nothing is reused.

        Raises if the hub refuses this engine, which ends vLLM.
        """
        return self._scheduler.result() if self._scheduler else None

    def process_report(self, report: WorkerReport) -> None:
        """Take a report of the workers; the first one has the proofs of all ranks."""
        self.reports.append(report)
        if report.proofs and not (self.reasons or self._scheduler):
            self._begin([proof for _, proof in sorted(report.proofs.items())])

    def next_step(self, is_idle: bool) -> None:
        """A step is planned. If vLLM computes nothing in it, a moment is waited for the hub."""
        self._n_steps += 1
        if is_idle:
            self.wait(LOOKUP_WAIT_S)
        if not self._scheduler and self._n_steps >= MOST_STEPS:
            self._refuse((NOT_HEARD,))

    def wait(self, timeout_s: float) -> None:
        """Wait until the start is over, if the workers have reported."""
        if self._scheduler:
            wait([self._scheduler], timeout_s)

    def close(self) -> None:
        """Close what has begun to serve."""
        with suppress(Exception):  # there is nothing to close
            if scheduler := self.result():
                scheduler.close()

    def _begin(self, proofs: list[WorkerProof]) -> None:
        supports = [proof.support for proof in proofs]
        if len(proofs) < self._n_ranks:
            supports = [unsupported(NOT_HEARD)]
        worst = next((support for support in supports if not support.layouts), None) or next(
            (support for support in supports if not support.blends), supports[0]
        )
        if not worst.layouts:
            self._refuse(worst.reasons)
            return
        for reason in worst.reasons:
            log.warning("BlendHub: %s", reason)
        self._scheduler = Future()
        threading.Thread(
            target=self._build, args=(self._scheduler, proofs, worst), name="blendhub-start", daemon=True
        ).start()

    def _refuse(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        for reason in reasons:
            log.warning("BlendHub: %s", reason)

    # In the thread.

    def _build(self, scheduler: "Future[ConnectorScheduler]", proofs: list[WorkerProof], support: ModelSupport) -> None:
        with ExitStack() as closing:
            try:
                built = self._built(proofs, support, closing)
                built.closing = closing.pop_all()
                scheduler.set_result(built)
            except BaseException as error:
                scheduler.set_exception(error)

    def _built(self, proofs: list[WorkerProof], support: ModelSupport, closing: ExitStack) -> ConnectorScheduler:
        config, settings = self._config, self._settings
        assert support.layouts and config.kv_transfer_config and settings.device
        namespace = Namespace(
            model=config.model_config.model,
            revision=str(config.model_config.revision or ""),  # vLLM may give a subclass of str
            weights=blake2b(" ".join(proof.weights for proof in proofs).encode(), digest_size=16).hexdigest(),
            rotary=proofs[0].rotary,
            world_size=len(proofs),
            copies=support.copies,
            layout=support.layouts[0],
            other_layouts=support.layouts[1:],
            matchers=settings.matchers,
        )
        facts = StartupFacts(
            settings=settings,
            blends=support.blends,
            role=str(config.kv_transfer_config.kv_role),
            max_model_len=config.model_config.max_model_len,
            namespace=namespace,
            finds_prefixes=finds_prefixes(self._host, settings),
            audits=support.audits,
            shows_hashes=support.shows_hashes,
            looks_ahead=bool(config.speculative_config and config.speculative_config.use_eagle()),
            costs=support.costs,
        )
        endpoint = settings.endpoint
        if not endpoint:
            hub = start_own_hub(settings.hub, self._host, self._transport)
            closing.callback(hub.close)
            endpoint = hub.endpoint
        observers = Observers(self._host.observers())
        closing.callback(observers.engine_stopping)
        place = HubPlace(HubAddress(endpoint, self._transport), namespace)
        executor = HubExecutor(place, self._engine_id, -1, self._host)
        closing.callback(executor.close)
        executor.reach()
        scheduler = build_scheduler(
            config,
            facts,
            Admission(config, settings, support, namespace),
            executor,
            observers,
            self._blocks,
            block_tables_of(self._kv_cache_config),
        )
        log.info("BlendHub: %s", capacity_line(config, self._kv_cache_config, blends=support.blends))
        observers.engine_started(
            EngineInfo(
                engine=self._engine_id,
                model=namespace.model,
                device=settings.device.name,
                matchers=tuple(choice.name for choice in settings.matchers),
                selector=settings.selector.name,
            )
        )
        return scheduler
