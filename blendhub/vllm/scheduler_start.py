"""The start of the connector in vLLM's scheduler: the workers' first report, and then the hub."""

import logging
import threading
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from hashlib import blake2b
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from blendhub.core.layout import Namespace
from blendhub.core.plugin_choice import PluginChoice
from blendhub.framework.hookspecs import EngineInfo
from blendhub.framework.host import PluginHost
from blendhub.framework.observers import Observers
from blendhub.vllm.hub_client import join_hub
from blendhub.vllm.messages import HubAddress, HubPlace, StepPlan, WorkerProof, WorkerReport
from blendhub.vllm.model.fingerprint import said_by
from blendhub.vllm.model_support import ModelSupport, unsupported
from blendhub.vllm.own_hub import start_own_hub
from blendhub.vllm.scheduler.admission import Admission
from blendhub.vllm.scheduler.blocks.block_tables import capacity_line
from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.connector_scheduler import ConnectorScheduler
from blendhub.vllm.scheduler.loads import LOOKUP_WAIT_S
from blendhub.vllm.scheduler.request.blocks import Tables
from blendhub.vllm.scheduler.side import Matched, NotServed, SchedulerSide
from blendhub.vllm.scheduler.startup import StartupFacts, finds_prefixes
from blendhub.vllm.settings import OWNER, Settings

log = logging.getLogger(__name__)

MAX_STEPS = 64
"""The step in whose plan the workers' first report must be known. vLLM plans only a few steps ahead of the reports."""

READY_S = 30.0
"""How long vLLM waits for the hub before it says that it is ready. If the hub takes longer, requests wait for it."""

NOT_HEARD = "the workers have not reported the checks of their model"

NO_PREFIXES = (
    "nothing is reused: the state of recurrent layers is of use behind its whole prefix only, and none of the matchers "
    f'finds prefixes; add {{"name": "prefix"}} to {OWNER}.matchers'
)


class SchedulerStart(SchedulerSide):
    """The time from vLLM's start until requests can be served.

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
        blocks: EngineBlocks,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        self._config = config
        self._settings = settings
        self._host = host
        self._transport = transport
        self._blocks = blocks
        self._kv_cache_config = kv_cache_config
        self._waiting: dict[str, Request] = {}
        """The requests that have arrived."""
        self._reports: list[WorkerReport] = []
        """The reports that have arrived: workers do not repeat what they report."""
        self._n_steps = 0
        self._serving: Future[SchedulerSide] = Future()
        """Who serves, once that is known."""
        self._is_building = False

    def successor(self, wait_s: float = 0.0) -> SchedulerSide:
        """Who serves from now on. Raises if the hub refuses this engine, which ends vLLM."""
        if self._is_building:
            wait([self._serving], wait_s)
        if not self._serving.done():
            return self
        serving = self._serving.result()
        for report in self._reports:
            serving.process_report(report)
        for request in self._waiting.values():
            serving.arrived(request)
        return serving

    def arrived(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def matched(self, request: Request, local: int) -> Matched:
        return None, False

    def allocated(self, request: Request, tables: Tables, n_external: int) -> None:
        pass

    def plan(self, step: SchedulerOutput) -> StepPlan:
        """A step is planned. If vLLM computes nothing in it, a moment is waited for the hub."""
        self._n_steps += 1
        if self._is_building and not step.total_num_scheduled_tokens:
            wait([self._serving], LOOKUP_WAIT_S)
        if not self._is_building and self._n_steps >= MAX_STEPS:
            self._refuse((NOT_HEARD,))
        return StepPlan()

    def process_report(self, report: WorkerReport) -> None:
        """Take a report of the workers; the first one has the proofs of all ranks."""
        self._reports.append(report)
        if report.proofs and not (self._is_building or self._serving.done()):
            self._begin([proof for _, proof in sorted(report.proofs.items())])

    def ended(self, request: Request, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        self._waiting.pop(request.request_id, None)
        return False, None

    @property
    def has_work(self) -> bool:
        """The start takes some steps."""
        return True

    def close(self) -> None:
        """Close what has begun to serve."""
        if self._is_building:
            with suppress(Exception):  # there is nothing to close
                self._serving.result().close()

    def _begin(self, proofs: list[WorkerProof]) -> None:
        supports = [proof.support for proof in proofs]
        if len(proofs) < self._config.parallel_config.tensor_parallel_size:
            supports = [unsupported(NOT_HEARD)]
        worst = next((support for support in supports if not support.layouts), None) or next(
            (support for support in supports if not support.blends), supports[0]
        )
        if not worst.layouts:
            self._refuse(worst.reasons)
            return
        if worst.state_layouts and not finds_prefixes(self._host, self._settings):
            self._refuse((NO_PREFIXES,))
            return
        for reason in worst.reasons:
            log.warning("BlendHub: %s", reason)
        self._is_building = True
        threading.Thread(target=self._build, args=(proofs, worst), name="blendhub-start", daemon=True).start()

    def _refuse(self, reasons: tuple[str, ...]) -> None:
        for reason in reasons:
            log.warning("BlendHub: %s", reason)
        self._serving.set_result(NotServed(reasons))

    # In the thread.

    def _build(self, proofs: list[WorkerProof], support: ModelSupport) -> None:
        with ExitStack() as closing:
            try:
                built = self._built(proofs, support, closing)
                built.closing = closing.pop_all()
                self._serving.set_result(built)
            except BaseException as error:
                self._serving.set_exception(error)

    def _built(self, proofs: list[WorkerProof], support: ModelSupport, closing: ExitStack) -> ConnectorScheduler:
        config, settings = self._config, self._settings
        assert support.layouts and config.kv_transfer_config and settings.device
        computes = [*(proof.weights for proof in proofs), said_by(config.model_config.hf_text_config)]
        namespace = Namespace(
            model=config.model_config.model,
            revision=str(config.model_config.revision or ""),  # vLLM may give a subclass of str
            weights=blake2b(" ".join(computes).encode(), digest_size=16).hexdigest(),
            rotary=proofs[0].rotary,
            world_size=len(proofs),
            copies=support.copies,
            layout=support.layouts[0],
            other_layouts=support.layouts[1:],
            matchers=settings.matchers,
            state_layouts=support.state_layouts,
            moves_states=bool(support.state_layouts) and support.blends,
        )
        facts = StartupFacts(
            settings=settings,
            support=support,
            role=str(config.kv_transfer_config.kv_role),
            max_model_len=config.model_config.max_model_len,
            namespace=namespace,
            finds_prefixes=finds_prefixes(self._host, settings),
            looks_ahead=bool(config.speculative_config and config.speculative_config.use_eagle()),
        )
        endpoint = settings.endpoint
        if not endpoint:
            hub = start_own_hub(settings.hub, self._host, self._transport)
            closing.callback(hub.close)
            endpoint = hub.endpoint
        observers = Observers(self._host.observers())
        closing.callback(observers.engine_stopping)
        place = HubPlace(HubAddress(endpoint, self._transport), namespace)
        engine = str(config.kv_transfer_config.engine_id)
        client = join_hub(place, engine, -1, self._host)
        closing.callback(client.close)
        client.reach()
        admission = Admission(config, settings, support, namespace)
        scheduler = ConnectorScheduler(config, facts, admission, place, client, observers, self._blocks)
        log.info("BlendHub: %s", capacity_line(config, self._kv_cache_config, blends=support.blends))
        observers.engine_started(
            EngineInfo(
                engine=engine,
                model=namespace.model,
                device=settings.device.name,
                matchers=tuple(choice.name for choice in settings.matchers),
                selector=settings.selector.name,
            )
        )
        return scheduler
