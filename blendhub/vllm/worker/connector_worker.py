"""The connector in a vLLM worker: loads, recomputes and saves what the scheduler has planned."""

import contextlib
import logging
from collections.abc import Callable

from msgspec.structs import replace

from blendhub.core.errors import BlendHubError, HubError, Unsupported
from blendhub.framework.host import PluginHost
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import LoadJob, LoadResult, StepPlan, WorkerReport
from blendhub.vllm.model.fingerprint import fingerprint
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.layer_copies import LayerCopies
from blendhub.vllm.worker.load_task import LoadProgress, LoadTask, PinnedArena
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from blendhub.vllm.worker.recompute import Blend, BlendContext
from blendhub.vllm.worker.repairs import Repairs
from blendhub.vllm.worker.saves import Saves

log = logging.getLogger(__name__)
ASLEEP = "vLLM has gone to sleep, and its KV cache is lost"


class ConnectorWorker:
    """One rank. All methods are called by the worker's own thread, and none waits for the hub but ``close``.

    A step of vLLM calls ``begin_step``, launches its forward, and calls ``load``, ``save`` and ``finished``; in some
    runners ``load`` comes before the forward. ``begin_step`` begins the copies of new loads. The device has them run
    beside the step's forward and not after it. That is safe: blocks that vLLM gives to a load are used by no forward
    that is still to come, and by none under way, because its scheduler keeps freed blocks until those have ended.
    Forwards of our own were submitted before ``begin_step``. Copies of other connectors follow nothing, so beside
    them a load ends when its own forwards have.
    """

    def __init__(self, context: BlendContext, host: PluginHost, engine_id: str, timeout_s: float) -> None:
        self._context = context
        self._ranks = context.ranks
        self._device = context.device
        self._host = host
        self._engine_id = engine_id
        self._timeout_s = timeout_s
        self._executor: HubExecutor | None = None
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
        self._forwards = Forwards(context)
        self._repairs = Repairs(context)
        self._copies = LayerCopies(context.device, context.groups)
        self._adapters = LoadedAdapters(context.model.adapters)
        self._loads: dict[str, LoadTask] = {}
        self._saves = Saves(self._open, self._copies, self._adapters, self._run_later, timeout_s)
        self._postponed = 0
        """How many tokens the last step left to be recomputed before the next one."""
        self._ending: set[str] = set()
        """Requests that have ended and whose blocks vLLM keeps for saves."""
        self._uncommitted: set[str] = set()
        """Requests that have ended and have commits left."""
        self._loaded: set[str] = set()
        self._failed: list[LoadJob] = []
        self._report = WorkerReport()

    def begin_step(self, plan: StepPlan) -> None:
        """Before vLLM computes: order it behind reads of blocks that it will overwrite, and begin the new loads."""
        if self._must_check_weights:
            self._must_check_weights = False
            self._has_other_weights = fingerprint(*self._context.model.modules) != self.weights
        if plan.hub:
            self._executor = HubExecutor(plan.hub, self._engine_id, self._ranks.number, self._host)
        has_tried = self._executor is not None and self._executor.has_tried
        # The arena is pinned as soon as it is known, at the start and after a restart of the hub.
        with contextlib.suppress(Exception):  # loads and saves raise it again
            self._open()
        if has_tried and not self._is_opened:
            self._is_opened = True
            self._report.opened = 1
        self._adapters.look(plan.number)
        # Before the device begins the step: new loads may write the blocks that saves still read.
        self._saves.settle(None if self._context.model.frees_blocks_early else plan.preempted)
        if plan.loads or self._loads:
            self._device.begin_step()
        for request in plan.cancelled & set(self._loads):
            self._loads[request].cancel()
        is_first = self._ranks.number == 0
        for job in plan.loads:
            load = LoadTask(job, self._open, self._copies, self._adapters, self._timeout_s, releases=is_first)
            self._loads[job.request] = load
        for load in self._loads.values():
            load.advance()
        for request in plan.unrepaired:
            self._repairs.forget(request)
        if plan.repair:
            self._repairs.step(plan.repair, is_idle=not plan.computes)
        if self._postponed:
            budget, self._postponed = self._postponed, 0
            self._forwards.step(self._blends, budget)

    def load(self, plan: StepPlan) -> None:
        """Continue the loads, within the step's budget of recomputed tokens.

        Where the runner samples after this, tokens of the step would wait for forwards that are launched before. So
        these are launched when the next step begins, and the tokens are on their way by then.
        """
        self._adapters.look(plan.number)
        self._go_on()
        if plan.computes and self._context.model.samples_last:
            self._postponed = plan.budget
        else:
            self._forwards.step(self._blends, plan.budget)

    def save(self, plan: StepPlan) -> None:
        """Begin to save what this step has computed."""
        self._saves.begin(plan.saves)
        self._ending |= plan.ending

    def finished(self) -> tuple[set[str], set[str]]:
        """The requests whose blocks can be freed, and the requests whose KV is loaded."""
        self._go_on()
        saved = {
            request
            for request in self._ending
            if not (self._saves.needs_blocks(request) or self._repairs.is_computing(request))
        }
        self._ending -= saved
        self._uncommitted |= saved
        loaded, self._loaded = self._loaded, set()
        return saved, loaded

    def take_failed(self) -> list[LoadJob]:
        """The loads that have failed, and whose requests were not aborted."""
        failed, self._failed = self._failed, []
        return failed

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        committed = {request for request in self._uncommitted if not self._saves.is_committing(request)}
        self._uncommitted -= committed
        for request in committed:
            self._saves.forget(request)
        report.committed_ranks = dict.fromkeys(committed, 1)
        repaired = self._repairs.take_results()
        report.repairs = repaired if self._ranks.number == 0 else {}
        report.saved_tokens, report.save_seconds, report.failed_saves = self._saves.take_numbers()
        adapters = self._adapters.take_changes()
        report.adapters = {} if adapters is None else {self._ranks.number: adapters}
        return report if report != WorkerReport() else None

    def detach(self) -> None:
        """Wait for all copies, and begin none until ``attach``. Loads fail, because what they have written is lost."""
        self._saves.settle(None)
        self._saves.wait()
        self._is_detached = True
        for load in self._loads.values():
            load.stop(HubError(ASLEEP))
        self._repairs.stop(HubError(ASLEEP))

    def attach(self) -> None:
        """Copy again. vLLM may load other weights before its next step."""
        self._is_detached, self._must_check_weights = False, True
        self._repairs.go_on()

    def close(self) -> None:
        self._saves.close()
        if self._executor:
            self._executor.close()
        self._device.close()

    @property
    def _blends(self) -> list[Blend]:
        """What is recomputed. All ranks hear in one plan which requests were aborted; their errors may differ."""
        return [load.blend for load in self._loads.values() if load.blend and not load.is_cancelled]

    def _go_on(self) -> None:
        """Begin and finish recomputation on all ranks in the same step."""
        loads = list(self._loads.values())
        for load in loads:
            load.advance()
        if not loads:
            return
        for load, progress in zip(loads, self._ranks.least([load.progress for load in loads]), strict=True):
            if progress == LoadProgress.PENDING:
                continue
            if progress != LoadProgress.PROBEABLE:
                load.release()
            if progress == LoadProgress.FAILED:
                self._fail(load)
                continue
            load.blend = load.blend or Blend(self._context, load.job)
            load.blend.is_loaded = progress != LoadProgress.PROBEABLE
            if progress == LoadProgress.PROVEN and load.blend.result:
                self._finish(load, replace(load.blend.result, load_seconds=load.seconds))

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
        del self._loads[load.job.request]
        self._loaded.add(load.job.request)
        self._report.loads[load.job.request] = result

    def _run_later(self, work: Callable[[], None]) -> None:
        assert self._executor
        self._executor.run_later(work)

    def _open(self) -> PinnedArena | None:
        """The hub's arena, which the device uses; None while nothing can be copied yet. Raises if that failed."""
        if self._has_other_weights:
            raise Unsupported("vLLM has had other weights since it slept; start it anew to reuse KV")
        if self._is_detached or not (self._executor and self._executor.has_tried):
            return None
        client = self._executor.client
        client.check_up()
        # The session's thread may register anew at any moment.
        session, arena = client.registered, client.arena
        if arena is None or arena.name != session.arena:
            return None
        if self._pinned != arena.name.nonce:
            if any(load.is_copying for load in self._loads.values()) or self._saves.is_copying():
                return None  # the device still copies in an earlier arena
            self._device.pin(arena.bytes, arena.progress)
            self._pinned = arena.name.nonce
        return PinnedArena(client, session.epoch, arena.name.nonce)
