"""The connector in a vLLM worker: loads, recomputes and saves what the scheduler has planned."""

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from blendhub.client.hub_client import HubClient
from blendhub.contracts import Segment, Transfer
from blendhub.core.errors import AdapterReplaced, BlendHubError, DeadlineExceeded, HubError
from blendhub.framework.host import PluginHost
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import LoadJob, LoadResult, SaveJob, StepPlan, WorkerReport
from blendhub.vllm.worker.forwards import Forwards
from blendhub.vllm.worker.layer_copies import LayerCopies
from blendhub.vllm.worker.load_task import LoadProgress, LoadTask
from blendhub.vllm.worker.loaded_adapters import LoadedAdapters
from blendhub.vllm.worker.recompute import Blend, BlendContext
from blendhub.vllm.worker.save_queue import SaveQueue

log = logging.getLogger(__name__)


class WaitingSave(NamedTuple):
    """A save that waits for the session with the hub."""

    job: SaveJob
    until: float


class ConnectorWorker:
    """One rank. All methods are called by the worker's own thread, and none waits for the hub but ``close``.

    A step of vLLM calls ``begin_step``, launches its forward, and calls ``load``, ``save`` and ``finished``; in some
    runners ``load`` comes before the forward. ``begin_step`` begins the copies of new loads. The device has them run
    beside the step's forward and not after it. That is safe: blocks that vLLM gives to a load are used by no forward
    that is still to come, and by none under way, because its scheduler keeps freed blocks until those have ended.
    """

    def __init__(self, context: BlendContext, host: PluginHost, engine_id: str, timeout_s: float) -> None:
        self._context = context
        self._forwards = Forwards(context)
        self._device = context.device
        self._copies = LayerCopies(context.device, context.groups)
        self._ranks = context.ranks
        self._adapters = LoadedAdapters(context.model.adapters)
        self._host = host
        self._engine_id = engine_id
        self._timeout_s = timeout_s
        self._executor: HubExecutor | None = None
        self._is_opened = False
        """Whether the first attempt to reach the hub and to pin its arena is over."""
        self._pinned: str | None = None
        """The nonce of the arena that the device uses."""
        self._loading: dict[str, LoadTask] = {}
        self._postponed = 0
        """How many tokens the last step left to be recomputed before the next one."""
        self._waiting: list[WaitingSave] = []
        self._saves = SaveQueue(self._run_later)
        self._ending: set[str] = set()
        """Requests that have ended and whose blocks vLLM keeps for saves."""
        self._uncommitted: set[str] = set()
        """Requests that have ended and have commits left."""
        self._loaded: set[str] = set()
        self._failed: list[LoadJob] = []
        self._report = WorkerReport()

    def begin_step(self, plan: StepPlan) -> None:
        """Before vLLM computes: finish reads of blocks that vLLM will overwrite, and begin the new loads."""
        if plan.hub:
            self._executor = HubExecutor(plan.hub, self._engine_id, self._ranks.number, self._host)
        self._open()
        self._adapters.look(plan.number)
        if plan.loads or self._loading:
            self._device.begin_step()
        self._settle_saves(plan.preempted)
        for request in plan.cancelled & set(self._loading):
            self._loading[request].cancel()
        for job in plan.loads:
            copy = partial(self._begin_copy, job)
            is_first = self._ranks.number == 0
            self._loading[job.request] = LoadTask(job, self._client, copy, self._timeout_s, releases=is_first)
        self._advance()
        postponed, self._postponed = self._postponed, 0
        if postponed:
            self._recompute(postponed)

    def load(self, plan: StepPlan) -> None:
        """Continue the loads, within the step's budget of recomputed tokens.

        Where the runner samples after this, tokens of the step would wait for forwards that are launched before. So
        these are launched when the next step begins, and the tokens are on their way by then.
        """
        self._adapters.look(plan.number)
        self._advance()
        self._agree()
        if plan.computes and self._context.model.samples_last:
            self._postponed = plan.budget
        else:
            self._recompute(plan.budget)

    def _recompute(self, budget: int) -> None:
        # All ranks hear in one plan which requests were aborted; their own errors differ until they agree.
        blending = {name: one.blend for name, one in self._loading.items() if one.blend and not one.is_cancelled}
        self._forwards.step(list(blending.values()), budget)
        for name, blend in blending.items():
            if blend.error:
                self._loading[name].fail(blend.error)

    def save(self, plan: StepPlan) -> None:
        """Begin to save what this step has computed."""
        until = time.monotonic() + self._timeout_s
        self._waiting += [WaitingSave(job, until) for job in plan.saves]
        self._begin_saves()
        self._ending |= plan.ending

    def finished(self) -> tuple[set[str], set[str]]:
        """The requests whose blocks can be freed, and the requests whose KV is loaded."""
        self._advance()
        self._agree()
        waiting = {save.job.request for save in self._waiting}
        saved = {request for request in self._ending - waiting if not self._saves.is_copying(request)}
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
        report.saved_tokens, report.save_seconds, report.failed_saves = self._saves.take_numbers()
        adapters = self._adapters.take_changes()
        report.adapters = {} if adapters is None else {self._ranks.number: adapters}
        return report if report != WorkerReport() else None

    def close(self) -> None:
        self._saves.close()
        if self._executor:
            self._executor.close()
        self._device.close()

    # Loading.

    def _advance(self) -> None:
        for loading in self._loading.values():
            try:
                self._adapters.check(loading.job.adapter, is_loaded=True)
            except AdapterReplaced as error:
                loading.fail(error)
            loading.advance()

    def _agree(self) -> None:
        """Begin and finish recomputation on all ranks in the same step."""
        loads = list(self._loading.values())
        if not loads:
            return
        for loading, arrival in zip(loads, self._ranks.least([loading.arrival for loading in loads]), strict=True):
            if arrival == LoadProgress.PENDING:
                continue
            loading.release()
            if arrival == LoadProgress.FAILED:
                self._fail(loading)
                continue
            loading.blend = loading.blend or Blend(self._context, loading.job)
            if arrival == LoadProgress.PROVEN and loading.blend.result:
                self._finish(loading, replace(loading.blend.result, load_seconds=loading.seconds))

    def _fail(self, loading: LoadTask) -> None:
        """Have vLLM compute the tokens of a failed load."""
        job, error = loading.job, loading.error or HubError("another rank failed")
        another_failed = loading.error is None
        loading.fail(error)
        if not loading.is_cancelled:
            # The traceback of a plugin's fault names the plugin.
            expected = isinstance(error.__cause__ or error, BlendHubError)
            exc_info = None if expected else error
            log.warning("request %s is computed without its stored KV: %s", job.request, error, exc_info=exc_info)
            self._failed.append(job)
        self._finish(loading, LoadResult(error=f"{type(error).__name__}: {error}", another_failed=another_failed))

    def _finish(self, loading: LoadTask, result: LoadResult) -> None:
        del self._loading[loading.job.request]
        self._loaded.add(loading.job.request)
        self._report.loads[loading.job.request] = result

    def _begin_copy(self, job: LoadJob, client: HubClient) -> Transfer:
        segments = [replace(piece, shard=client.shard_at(piece.shard)) for piece in job.pieces]
        transfer = self._copies.load(segments, job.blocks, job.decision.start)
        self._wait_unless_overlapping(transfer)
        return transfer

    # Saving.

    def _settle_saves(self, preempted: set[str]) -> None:
        """Finish all reads from the blocks of these requests: vLLM is about to reuse them."""
        frees_all = self._context.model.frees_blocks_early
        self._saves.wait(None if frees_all else preempted)
        waiting, self._waiting = self._waiting, []
        for save in waiting:
            if frees_all or save.job.request in preempted:
                error = DeadlineExceeded("vLLM freed its blocks before the session with the hub was open")
                self._saves.note(save.job, error)
            else:
                self._waiting.append(save)

    def _begin_saves(self) -> None:
        waiting, self._waiting = self._waiting, []
        for save in waiting:
            if self._saves.has_failed(save.job):
                continue
            client = None
            try:
                # The saves of a lease are done in order.
                is_next = all(other.job.right != save.job.right for other in self._waiting)
                client = self._client() if is_next else None
                if client:
                    self._begin_save(save.job, client)
                elif time.monotonic() > save.until:
                    raise DeadlineExceeded("the session with the hub was not open for too long")
                else:
                    self._waiting.append(save)
            except Exception as error:  # the accelerator may fail, and the request does not need its save
                self._saves.note(save.job, error, client)

    def _begin_save(self, job: SaveJob, client: HubClient) -> None:
        self._adapters.check(job.adapter, is_loaded=False)
        if job.right.arena != self._pinned:
            raise HubError("the slots are of another arena than this worker has mapped; the hub was restarted")
        span = job.slot.span
        segment = Segment(span, client.shard_at(job.slot.slot), 0, span.start)
        with ExitStack() as right:
            right.enter_context(client.writing(job.right))
            transfer = self._copies.save([segment], job.blocks)
            self._saves.add(job, transfer, right.pop_all(), client)
        self._wait_unless_overlapping(transfer)

    # Both.

    def _open(self) -> None:
        """Have the device pin the arena as soon as it is known, at the start and after a restart of the hub."""
        has_tried = self._executor is not None and self._executor.has_tried
        with contextlib.suppress(Exception):  # loads and saves raise it again
            self._client()
        if has_tried and not self._is_opened:
            self._is_opened = True
            self._report.opened = 1

    def _client(self) -> HubClient | None:
        """The client, with its arena pinned; None while one of both is still to come. Raises if that failed."""
        client = self._executor.client() if self._executor else None
        return client if client and self._pin(client) else None

    def _pin(self, client: HubClient) -> bool:
        """Have the device use the client's arena; returns False while it still copies in an earlier arena."""
        arena = client.arena
        assert arena, "a registered client has mapped the arena"
        if self._pinned != arena.name.nonce:
            if any(loading.is_copying for loading in self._loading.values()) or self._saves.is_copying():
                return False
            self._device.pin(arena.bytes, arena.progress)
            self._pinned = arena.name.nonce
        return True

    def _wait_unless_overlapping(self, transfer: Transfer) -> None:
        if not self._device.overlaps_compute:
            with contextlib.suppress(Exception):  # ``done`` and ``wait`` raise it again for the load or save
                transfer.wait()

    def _run_later(self, work: Callable[[], None]) -> None:
        assert self._executor
        self._executor.run_later(work)

    def _run(self, work: Callable[[HubClient], None]) -> "Future[None]":
        assert self._executor
        return self._executor.run(work)
