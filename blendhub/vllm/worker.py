"""The connector in a worker: loads, recomputes and saves, as the scheduler's side says."""

import contextlib
import logging
from contextlib import ExitStack
from enum import IntEnum

import torch
from vllm.distributed.parallel_state import get_tp_group

from blendhub.client import HubClient
from blendhub.contracts import Device, Segment, Selector, Transfer
from blendhub.errors import BlendHubError, HubError
from blendhub.host import PluginHost
from blendhub.vllm.decision import clipped
from blendhub.vllm.gate import Gate
from blendhub.vllm.messages import Load, Outcome, Save, StepPlan, WorkerReport
from blendhub.vllm.model import EngineModel
from blendhub.vllm.pages import paged_layer
from blendhub.vllm.recompute import Blend, Engine
from blendhub.vllm.saver import Saver
from blendhub.vllm.sessions import Sessions
from blendhub.vllm.settings import Settings

log = logging.getLogger(__name__)


class Worker:
    """One rank. All methods are called by the worker's own thread."""

    def __init__(
        self,
        model: EngineModel,
        gate: Gate,
        settings: Settings,
        selector: Selector,
        host: PluginHost,
        engine_id: str,
    ) -> None:
        assert gate.layout and settings.device
        self._host = host
        self._engine_id = engine_id
        self._group = get_tp_group()
        self._device: Device = host.create("device", settings.device.name, settings.device.options)
        rotations = gate.rotations or (None,) * len(model.layer_names)
        layers = [paged_layer(model, index, rotation) for index, rotation in enumerate(rotations)]
        self._device.attach(layers, model.page_size, gate.layout)
        self._engine = Engine(model, layers, gate.layout, self._device, selector, self._sum_over_ranks)
        self._sessions: Sessions | None = None
        self._pinned: str | None = None
        self._loading: dict[str, Loading] = {}
        self._saver = Saver()
        self._ending: set[str] = set()
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._report = WorkerReport()

    def load(self, plan: StepPlan) -> None:
        """Begin what is new, then go on with what was begun, within the step's budget."""
        for request in plan.cancelled & set(self._loading):
            self._finish(self._loading.pop(request), Outcome(error="the request was aborted"))
        for job in plan.loads:
            self._loading[job.request] = Loading(job)
            self._begin(self._loading[job.request], plan)
        self._welcome_arrivals()
        budget = plan.budget
        for loading in list(self._loading.values()):
            if budget <= 0:
                break
            if loading.blend:
                budget -= self._go_on(loading, loading.blend, budget)

    def save(self, plan: StepPlan) -> None:
        """Begin to save what this step computed."""
        begun: list[Transfer] = []
        for job in plan.saves:
            if self._saver.gave_up(job):
                continue
            client = None
            try:
                client = self._open(plan, job.space)
                transfer, right = self._begin_save(job, client)
                self._saver.add(job, transfer, right, client)
                begun.append(transfer)
            except BlendHubError as error:
                self._saver.note(job, error, client)
        if not self._device.on_the_side:
            for transfer in begun:
                with contextlib.suppress(Exception):  # the saver hears of it too
                    transfer.wait()
        self._ending |= plan.ending

    def settle_saves(self, preempted: set[str]) -> None:
        """Wait for the saves of these requests: their blocks are about to be used for something else."""
        self._saver.wait(None if self._engine.model.frees_blocks_early else preempted)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks may go, and requests whose KV has arrived."""
        saved = {request for request in self._ending if not self._saver.is_busy_with(request)}
        self._ending -= saved
        for request in saved:
            self._saver.forget(request)
        loaded, self._loaded = self._loaded, set()
        return saved, loaded

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        report.saved_tokens, report.failed_saves = self._saver.take_numbers()
        return report if report != WorkerReport() else None

    def close(self) -> None:
        self._saver.close()
        if self._sessions:
            self._sessions.close()
        self._device.close()

    # Loading.

    def _begin(self, loading: "Loading", plan: StepPlan) -> None:
        job = loading.job
        try:
            client = self._open(plan, job.space)
            found = client.acquire(job.decision.matches, job.decision.start)
            loading.client, loading.lease = client, found.lease
            segments = [
                Segment(piece.span, client.shard_at(piece.slot), piece.slot_token, piece.source_start)
                for piece in found.pieces
            ]
            expected = sum(len(span) for span in [*job.decision.exact, *job.decision.moved])
            given = sum(min(s.span.end, job.decision.end) - max(s.span.start, job.decision.start) for s in segments)
            if given != expected:
                raise HubError(f"of {expected} tokens that were found, the hub has only {given} left")
            pages = self._engine.model.pages(job.blocks)
            loading.transfer = self._device.load(segments, pages, job.decision.start)
        except BlendHubError as error:
            loading.error = error

    def _welcome_arrivals(self) -> None:
        """Let what has arrived on all ranks be computed with; none may begin if another cannot."""
        waiting = [loading for loading in self._loading.values() if not loading.blend]
        if not waiting:
            return
        states = torch.tensor([self._state_of(loading) for loading in waiting])
        if self._group.world_size > 1:
            torch.distributed.all_reduce(states, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        for loading, state in zip(waiting, states.tolist(), strict=True):
            if state == Arrival.FAILED:
                self._fail(loading)
            elif state == Arrival.WELL:
                loading.blend = Blend(self._engine, loading.job)

    def _state_of(self, loading: "Loading") -> "Arrival":
        if self._device.on_the_side and loading.transfer and not loading.transfer.done():
            return Arrival.PENDING
        loading.settle()
        return Arrival.FAILED if loading.error else Arrival.WELL

    def _go_on(self, loading: "Loading", blend: Blend, budget: int) -> int:
        """Bring a load forward; returns the tokens that were computed for it."""
        spent = 0
        try:
            while spent < budget and blend.outcome is None:
                spent += blend.step(budget - spent)
        except Exception as error:  # a model that fails on chosen tokens may well compute all of them
            if isinstance(error, BlendHubError):
                loading.error = error
            else:
                log.exception("the model failed on chosen tokens")
                loading.error = BlendHubError(f"the model failed on chosen tokens: {type(error).__name__}: {error}")
            self._fail(loading)
            return spent
        if blend.outcome is not None:
            self._finish(self._loading.pop(loading.job.request), blend.outcome)
        return spent

    def _fail(self, loading: "Loading") -> None:
        """Have vLLM compute these tokens itself."""
        job, error = self._loading.pop(loading.job.request).job, loading.error or HubError("another rank failed")
        log.warning("request %s is computed without what was stored: %s", job.request, error)
        size = self._engine.model.block_size
        self._bad_blocks |= set(job.blocks[job.decision.start // size : -(-job.decision.end // size)].tolist())
        self._finish(loading, Outcome(error=f"{type(error).__name__}: {error}"))

    def _finish(self, loading: "Loading", outcome: Outcome) -> None:
        loading.settle()
        self._loaded.add(loading.job.request)
        self._report.loads[loading.job.request] = outcome

    # Saving.

    def _begin_save(self, job: Save, client: HubClient) -> tuple[Transfer, ExitStack]:
        """A copy under way, and the right to write that it needs until it has ended."""
        if job.right.arena != self._pinned:
            raise HubError("the slots are of another arena than this worker has mapped; the hub was restarted")
        segments = []
        for slot in job.slots:
            span = clipped(job.span, slot.span)
            segments.append(Segment(span, client.shard_at(slot.slot), span.start - slot.span.start, span.start))
        with ExitStack() as right:
            right.enter_context(client.writing(job.right))
            transfer = self._device.save(segments, self._engine.model.pages(job.blocks))
            return transfer, right.pop_all()

    # Both.

    def _open(self, plan: StepPlan, space: str) -> HubClient:
        if self._sessions is None:
            self._sessions = Sessions(plan.address, self._engine_id, self._group.rank_in_group, self._host)
        client = self._sessions.open(plan.spaces[space])
        if client.arena is None:
            raise HubError("the hub's arena is on another machine; run a hub on this one")
        if self._pinned != client.arena.name.nonce:
            # A hub that was restarted has another arena.
            self._saver.wait()
            self._device.pin(client.arena.bytes)
            self._pinned = client.arena.name.nonce
        return client

    def _sum_over_ranks(self, scores: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(scores) if self._group.world_size > 1 else scores


class Arrival(IntEnum):
    """What has become of a copy. Of several ranks the least counts: nothing is given up while one still copies."""

    PENDING = 0
    FAILED = 1
    WELL = 2


class Loading:
    """A request on its way in."""

    def __init__(self, job: Load) -> None:
        self.job = job
        self.client: HubClient | None = None
        self.lease: int | None = None
        self.transfer: Transfer | None = None
        self.blend: Blend | None = None
        self.error: BlendHubError | None = None

    def settle(self) -> None:
        """Wait for the copy, then end the lease; only a lease that held until then vouches for the bytes."""
        try:
            if self.transfer:
                self.transfer.wait()
        except BlendHubError as error:
            self.error = error
        finally:
            self.transfer = None
        lease, self.lease = self.lease, None
        if lease is not None and self.client:
            try:
                self.client.release(lease)
            except BlendHubError as error:
                self.error = error
