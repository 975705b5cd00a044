"""The connector in a vLLM worker: loads, recomputes and saves what the scheduler has planned."""

import contextlib
import logging
import time
from collections import deque

from msgspec.structs import replace

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError, HubError, Unsupported
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost
from blendhub.vllm.hub_client import join_hub
from blendhub.vllm.messages import LoadJob, LoadResult, RepairResult, StepPlan, WorkerReport
from blendhub.vllm.model.fingerprint import fingerprint
from blendhub.vllm.model.pages import clear_pages
from blendhub.vllm.model.sampling import Sampling
from blendhub.vllm.worker.doubts import Doubts, Watch
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.layer_copies import LayerCopies
from blendhub.vllm.worker.load_task import LoadProgress, LoadTask, PinnedArena
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from blendhub.vllm.worker.recompute import Blend, BlendContext, HostCopy
from blendhub.vllm.worker.repairs import Repairs
from blendhub.vllm.worker.request import Ending, WorkerRequest
from blendhub.vllm.worker.saves import Saves
from blendhub.vllm.worker.side import WorkerSide

log = logging.getLogger(__name__)
ASLEEP = "vLLM has gone to sleep, and its KV cache is lost"
WAIT_S = 0.005
"""How long a step that computes nothing waits for what loads need next, or for the end of a repair: less than a step
that writes an answer takes. A request that arrives meanwhile waits, too."""
POLL_S = 5e-5
LEAVE_S = 1.0
"""How long ``close`` waits for the end of the session."""


class ConnectorWorker(WorkerSide):
    """One rank.

    ``begin_step`` begins the copies of new loads. The device has them run beside the step's forward and not after it.
    That is safe: blocks that vLLM gives to a load are used by no forward that is still to come, and by none under way,
    because its scheduler keeps freed blocks until those have ended. Forwards of our own were submitted before it.
    Copies of other connectors follow nothing, so beside them a load ends when its own forwards have.
    """

    def __init__(self, context: BlendContext, host: PluginHost, engine_id: str, timeout_s: float) -> None:
        self._context = context
        self._ranks = context.ranks
        self._device = context.device
        self._host = host
        self._engine_id = engine_id
        self._timeout_s = timeout_s
        self._client: HubClient | None = None
        self._is_opened = False
        """Whether the first attempt to reach the hub and to pin its arena is over."""
        self._pinned: str | None = None
        """The nonce of the arena that the device uses."""
        self.weights = fingerprint(*context.model.modules)
        """What stored KV was computed with."""
        self._is_detached = False
        """Whether vLLM's KV cache is unmapped."""
        self._must_check_weights = False
        self._has_other_weights = False
        self._requests: dict[str, WorkerRequest] = {}
        """All requests of which something is left to do."""
        self._n_loads = 0
        self._forwards = Forwards(context)
        self._repairs = Repairs(context)
        self._doubts = Doubts(context)
        self._copies = LayerCopies(context.device, context.groups, context.states)
        self._adapters = LoadedAdapters(context.model.adapters)
        self._saves = Saves(self._requests, self._open, self._copies, self._adapters, timeout_s)
        self._postponed = 0
        """How many tokens the last step left to be recomputed before the next one."""
        self._repairing: deque[HostCopy | None] = deque()
        """Of each computation of a repair that was not reported yet, some number that the device computes last."""
        self._loaded: set[str] = set()
        self._failed: list[LoadJob] = []
        self._report = WorkerReport()
        self._has_told = False
        """Whether the last report said that a load has ended: vLLM may hear of it only behind the next step."""

    def begin_step(self, plan: StepPlan) -> None:
        self._check_weights()  # first: nothing is reused with others
        self._reach_hub(plan)  # loads and saves need its arena
        self._adapters.look(plan.number)
        # Before the device begins the step: new loads may write the blocks that saves still read.
        self._saves.go_on()
        self._saves.free_blocks(None if self._context.model.frees_blocks_early else plan.preempted)
        self._begin_loads(plan)
        # Before vLLM's forward: what is repaired by then is exact in it.
        self._repair(plan)
        self._watch(plan)
        if self._postponed:
            budget, self._postponed = self._postponed, 0
            self._forwards.step(self._blends, budget)

    def load(self, plan: StepPlan) -> None:
        """Continue the loads, within the step's budget of recomputed tokens.

        Where the runner samples after this, tokens of the step would wait for forwards that are launched before. So
        these are launched when the next step begins, and the tokens are on their way by then.
        """
        self._adapters.look(plan.number)
        progress = self._go_on_loading()
        if plan.computes and self._context.model.samples_last:
            self._postponed = plan.budget
            return
        spent = self._forwards.step(self._blends, plan.budget)
        if not (plan.computes or self._has_told):
            until = time.monotonic() + WAIT_S
            self._load_on(progress, plan.budget - spent, until)
            while self._is_repairing and not self._loads and time.monotonic() < until:
                time.sleep(POLL_S)

    def before_sampling(self, sampling: Sampling) -> None:
        """Hold the step for tokens that the model is in doubt about. The runner calls it behind the forward."""
        margins = self._doubts.look(sampling)
        if self._ranks.number == 0:
            self._report.margins |= margins

    def save(self, plan: StepPlan) -> None:
        self._saves.begin(plan.saves, self._record)
        for name in plan.ending:
            self._record(name).ending = Ending.COPYING

    def finished(self) -> tuple[set[str], set[str]]:
        self._go_on_loading()
        self._saves.go_on()
        saved = set()
        for record in self._requests.values():
            if record.ending is Ending.COPYING and not record.needs_blocks:
                record.ending = Ending.COMMITTING
                saved.add(record.name)
        loaded, self._loaded = self._loaded, set()
        return saved, loaded

    def take_failed(self) -> list[LoadJob]:
        failed, self._failed = self._failed, []
        return failed

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        self._has_told = bool(report.loads)
        self._saves.report(report)
        while self._repairing and not self._is_repairing:
            self._repairing.popleft()
            report.repaired += self._ranks.number == 0
        repaired: dict[str, RepairResult] = {}
        for record in list(self._requests.values()):
            if record.repair and (result := record.repair.result()):
                repaired[record.name], record.repair = result, None
            if record.ending is Ending.COMMITTING and not record.saves:
                report.committed_ranks[record.name] = 1
                record.ending, record.failed_rights, record.maps = None, set(), {}
            if record.is_over:  # another request may have the same name by now
                del self._requests[record.name]
        report.repairs = repaired if self._ranks.number == 0 else {}
        adapters = self._adapters.take_changes()
        report.adapters = {} if adapters is None else {self._ranks.number: adapters}
        return report if report != WorkerReport() else None

    def detach(self) -> None:
        self._saves.free_blocks(None)
        self._saves.go_on(waits=True)
        self._is_detached = True
        asleep = HubError(ASLEEP)
        self._repairs.stop(asleep)
        for record in self._requests.values():
            if record.load:
                record.load.stop(asleep)
            if record.repair:
                record.repair.fail(asleep)

    def attach(self) -> None:
        self._is_detached, self._must_check_weights = False, True
        self._repairs.stop(None)

    def close(self) -> None:
        self._saves.go_on(waits=True)
        if self._client:
            self._client.close(LEAVE_S)
        self._device.close()

    # The parts of a step.

    def _check_weights(self) -> None:
        if self._must_check_weights:
            self._must_check_weights = False
            self._has_other_weights = fingerprint(*self._context.model.modules) != self.weights

    def _reach_hub(self, plan: StepPlan) -> None:
        """The arena is pinned as soon as it is known, at the start and after a restart of the hub."""
        if plan.hub:
            self._client = join_hub(plan.hub, self._engine_id, self._ranks.number, self._host)
        has_tried = self._client is not None and self._client.has_tried
        with contextlib.suppress(Exception):  # loads and saves raise it again
            self._open()
        if has_tried and not self._is_opened:
            self._is_opened = True
            self._report.opened = 1

    def _begin_loads(self, plan: StepPlan) -> None:
        if self._context.model.recurrent:
            for job in plan.loads:
                self._clear(job)
        if plan.loads or self._loads:
            self._device.begin_step()
        for name in plan.cancelled:
            if record := self._requests.get(name):
                record.maps = {}
                if record.load:
                    record.load.cancel()
        is_first = self._ranks.number == 0
        for job in plan.loads:
            load = LoadTask(job, self._open, self._copies, self._adapters, self._timeout_s, releases=is_first)
            self._n_loads += 1
            record = self._record(job.request)
            record.load, record.load_number = load, self._n_loads
        for load in self._loads:
            load.advance()

    def _clear(self, job: LoadJob) -> None:
        """Clear the blocks that a load does not fill by itself, before the device begins the step, whose copies fill
        them in part. Engines of one hub may have states behind other blocks than this one's."""
        if not self._is_detached:
            left = Span(job.decision.state_end, job.decision.end)
            clear_pages(self._context.model, self._context.layers, job.blocks, left)

    @property
    def _is_repairing(self) -> bool:
        """Whether the device still computes the repair that comes first."""
        return bool(self._repairing) and self._repairing[0] is not None and not self._repairing[0].has_arrived

    def _load_on(self, progress: list[int], budget: int, until: float) -> None:
        """Take loads further in a step that computes nothing, as soon as one can go on and until one ends: vLLM sleeps
        for a millisecond behind each such step. All ranks go on alike, while they do."""
        spent = 0
        while progress and not self._loaded and spent < budget:
            while time.monotonic() < until and not self._has_news:
                time.sleep(POLL_S)
            now = self._go_on_loading()
            computed = self._forwards.step(self._blends, budget - spent)
            if now == progress and not computed:
                return
            progress, spent = now, spent + computed

    @property
    def _has_news(self) -> bool:
        """Whether a load has come further on this rank than all ranks know."""
        for load in self._loads:
            load.advance()
        return any(load.has_news for load in self._loads)

    def _go_on_loading(self) -> list[int]:
        """Begin and finish recomputation on all ranks in the same step. Returns how far all are with each load."""
        loads = self._loads
        for load in loads:
            load.advance()
        if not loads:
            return []
        least = self._ranks.least([load.told() for load in loads])
        for load, progress in zip(loads, least, strict=True):
            if progress == LoadProgress.PENDING:
                continue
            if progress not in (LoadProgress.PROBEABLE, LoadProgress.COPIED):
                load.release()
            if progress == LoadProgress.FAILED:
                self._fail(load)
                continue
            load.blend = load.blend or Blend(self._context, load.job, load.maps)
            load.blend.is_loaded = progress != LoadProgress.PROBEABLE
            if progress == LoadProgress.PROVEN and load.blend.result:
                if load.blend.made:
                    self._saves.keep_maps(self._requests[load.job.request], load.blend.made)
                self._finish(load, replace(load.blend.result, load_seconds=load.seconds))
        return least

    def _fail(self, load: LoadTask) -> None:
        """Have vLLM compute the tokens of a failed load."""
        error = load.error or HubError("another rank failed")
        if not load.is_cancelled:
            # The traceback of a plugin's fault names the plugin.
            exc_info = None if isinstance(error.__cause__ or error, BlendHubError) else error
            name = load.job.request
            log.warning("request %s is computed without its stored KV: %s", name, error, exc_info=exc_info)
            self._failed.append(load.job)
        sentence = f"{type(error).__name__}: {error}"
        self._finish(load, LoadResult(error=sentence, another_failed=load.error is None))

    def _finish(self, load: LoadTask, result: LoadResult) -> None:
        self._requests[load.job.request].load = None
        self._loaded.add(load.job.request)
        self._report.loads[load.job.request] = result

    def _repair(self, plan: StepPlan) -> None:
        for name in plan.unrepaired:
            if record := self._requests.get(name):
                record.repair = record.watch = None
        job = plan.repair
        if job is None:
            return
        record, computing = self._record(job.request), None
        is_exact = record.watch is not None and record.watch.is_exact
        if job.is_first and not is_exact:
            record.repair = record.repair or self._repairs.begin(job.prompt_tokens, compares=job.compares)
        if record.repair and not is_exact:
            computing = self._repairs.compute(record.repair, job)
            record.repaired = computing or record.repaired
        self._repairing.append(computing)

    def _watch(self, plan: StepPlan) -> None:
        """Look at this step's tokens of requests whose KV is approximate when they are sampled."""
        self._doubts.begin_step(plan.number, plan.pause_s)
        for job in plan.doubts:
            record = self._record(job.request)
            if job.is_first:
                record.watch = Watch(job)
                record.repair = record.repair or self._repairs.begin(job.prompt_tokens, compares=job.compares)
            elif record.watch:
                record.watch.add(job)
            # A repair that has failed is reported, and then there is none.
            if record.watch and not record.watch.is_exact and record.repair:
                self._doubts.watch(job, record.watch, record.repair)

    @property
    def _loads(self) -> list[LoadTask]:
        """The loads under way, in the same order on all ranks."""
        loading = [record for record in self._requests.values() if record.load]
        return [record.load for record in sorted(loading, key=lambda record: record.load_number) if record.load]

    @property
    def _blends(self) -> list[Blend]:
        """What is recomputed. All ranks hear in one plan which requests were aborted; their errors may differ."""
        return [load.blend for load in self._loads if load.blend and not load.is_cancelled]

    def _record(self, name: str) -> WorkerRequest:
        """The record of a request, made by the first job that names it."""
        return self._requests.setdefault(name, WorkerRequest(name))

    def _open(self) -> PinnedArena | None:
        """The hub's arena, which the device uses; None while nothing can be copied yet. Raises if that failed."""
        if self._has_other_weights:
            raise Unsupported("vLLM has had other weights since it slept; start it anew to reuse KV")
        if self._is_detached or not (self._client and self._client.has_tried):
            return None
        client = self._client
        client.check_up()
        # The session's thread may register anew at any moment.
        session, arena = client.registered, client.arena
        if arena is None or arena.name != session.arena:
            return None
        if self._pinned != arena.name.nonce:
            if any(load.is_copying or load.reads_maps for load in self._loads) or self._saves.are_copying:
                return None  # the device still copies in an earlier arena
            self._device.pin(arena.bytes, arena.progress)
            self._pinned = arena.name.nonce
        return PinnedArena(client, session.epoch, arena.name.nonce)
