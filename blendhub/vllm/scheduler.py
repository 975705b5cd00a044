"""The connector in vLLM's scheduler: asks the hub, decides, and tells the workers what to do.

Nothing here waits for the hub but ``matched``, and that for a moment only.
"""

import contextlib
import logging
import time
from collections import Counter
from functools import partial
from typing import Any

import msgspec
import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from blendhub.client import HubClient, PendingReply
from blendhub.errors import BlendHubError
from blendhub.host import PluginHost
from blendhub.vllm.decision import Refusal, decide
from blendhub.vllm.errands import Errands
from blendhub.vllm.messages import Address, Load, StepPlan, WorkerReport
from blendhub.vllm.requests import Admission
from blendhub.vllm.runs import total
from blendhub.vllm.sessions import Sessions
from blendhub.vllm.settings import Settings
from blendhub.vllm.startup import Facts, Watch
from blendhub.vllm.storing import Storing
from blendhub.vllm.taint import can_taint, taint
from blendhub.vllm.tracking import Tracked
from blendhub.wire import Found

log = logging.getLogger(__name__)


class SchedulerSide:
    """All methods are called by the scheduler's thread."""

    def __init__(
        self,
        config: VllmConfig,
        settings: Settings,
        admission: Admission,
        address: Address,
        engine_id: str,
        host: PluginHost,
        facts: Facts,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._config = config
        self._settings = settings
        self._admission = admission
        self._address = address
        self.errands = Errands(Sessions(address, engine_id, -1, host))
        self.storing = Storing(self.errands, config.cache_config.block_size, settings.policy.min_saved_tokens)
        self._tracked: dict[str, Tracked] = {}
        self._patience_s = settings.lookup_wait_ms / 1000
        self._loads: list[tuple[Load, Tracked]] = []
        self._cancelled: set[str] = set()
        self._told: set[str] = set()
        """Refusals that were logged: each code once is enough."""
        session = self.errands.session(admission.namespace)
        session.result()
        self._watch = Watch(facts, lambda: session.result() if session.done() else None)
        self._watch.refusal()

    # A request arrives, and is admitted.

    def arrived(self, request: Request) -> None:
        """A new request: ask the hub about it at once, long before its turn comes."""
        tracked = self._admission.admit(request, self._watch.refusal())
        self._tracked[request.request_id] = tracked
        if tracked.refusal:
            self._count_refusal(tracked, tracked.refusal)
        else:
            self._ask(tracked)

    def matched(self, request: Request, local: int) -> tuple[int | None, bool]:
        """How many tokens after the first ``local`` will be there; None: ask again later."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.engine_tokens = local
        if request.skip_reading_prefix_cache and not tracked.refusal:
            self._refuse(
                tracked, Refusal("all_computed", "the request needs every token computed, as prompt logprobs do")
            )
        if tracked.refusal or (tracked.outcome and tracked.outcome.error):
            return 0, False
        if tracked.outcome:
            # It was preempted, and lost what was loaded.
            tracked.outcome = tracked.decision = None
            self._ask(tracked)
        try:
            if tracked.found is None and not self._answered(tracked):
                return None, False
        except BlendHubError as error:
            self._refuse(tracked, Refusal("hub_failed", f"{type(error).__name__}: {error}"))
            return 0, False
        return self._decide(tracked, local)

    def allocated(self, request: Request, blocks: list[int], n_external: int) -> None:
        """vLLM has made room for what ``matched`` promised."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not n_external or tracked.decision is None:
            return
        decision = tracked.decision
        tracked.is_loading = True
        tracked.was_approximate_from = tracked.first_approximate
        tokens = tracked.tokens()[: decision.end]
        self._loads.append((Load(tracked.id, tracked.space, tokens, np.asarray(blocks, np.int64), decision), tracked))
        if decision.first_approximate is not None:
            self._becomes_approximate(tracked, decision.first_approximate)
            size = self._config.cache_config.hash_block_size or self._config.cache_config.block_size
            taint(request, decision.first_approximate, size)

    def _becomes_approximate(self, tracked: Tracked, first: int) -> None:
        """From here on, or from further ahead, KV is not what the model alone would compute."""
        known = tracked.first_approximate
        if known is None or first < known:
            tracked.first_approximate = first
            # If it was preempted, more of it was to be stored as exact.
            self.storing.give_up(tracked)

    # A step.

    def plan(self, step: SchedulerOutput) -> StepPlan:
        """What the workers do in this step."""
        self._patience_s = self._settings.lookup_wait_ms / 1000
        plan = StepPlan(self._address, budget=self._budget(step))
        for load, tracked in self._loads:
            plan.loads.append(load)
            plan.spaces[load.space] = tracked.namespace
        self._loads.clear()
        plan.cancelled, self._cancelled = self._cancelled, set()
        plan.preempted = set(step.preempted_req_ids or ())
        self.storing.plan(step, self._tracked, plan)
        while not self.storing.refused.empty():
            self.counters[f"reservations_failed_{type(self.storing.refused.get()).__name__}"] += 1
        return plan

    def heard(self, report: WorkerReport) -> None:
        """What the workers have done."""
        self.counters["saved_tokens"] += report.saved_tokens
        for reason, count in report.failed_saves.items():
            self.counters[f"saves_failed_{reason}"] += count
        for request, outcome in report.loads.items():
            tracked = self._tracked.get(request)
            if tracked is None or tracked.decision is None:
                continue
            tracked.is_loading = False
            tracked.outcome = outcome
            self._let_go(tracked)
            if outcome.error:
                self.counters["loads_failed"] += 1
                # vLLM computes what was not loaded. Of an earlier time blended blocks may be left all the same.
                tracked.first_approximate = tracked.was_approximate_from
                continue
            moved = tracked.decision.moved
            self.counters["requests_blended" if moved else "requests_exact"] += 1
            self.counters["tokens_exact"] += sum(map(len, tracked.decision.exact))
            self.counters["tokens_moved"] += sum(map(len, moved))
            self.counters["tokens_recomputed"] += total(outcome.recomputed)
            self.counters["tokens_in_holes"] += outcome.holes
            self.counters["blend_microseconds"] += round(outcome.seconds * 1e6)

    # A request ends.

    def ended(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are needed for a while, and what to tell whoever asked for it."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        told = {"blendhub": tracked.report()}
        if log.isEnabledFor(logging.DEBUG):
            # Streams and batches of many clients have no other way to see it.
            log.debug("%s", msgspec.json.encode({"request": tracked.id, **told}).decode())
        if tracked.is_loading:
            # vLLM keeps the blocks until the workers say that they have stopped.
            self._cancelled.add(tracked.id)
            self._loads = [(load, owner) for load, owner in self._loads if owner is not tracked]
            self._let_go(tracked)
            return False, told
        self._let_go(tracked)
        return self.storing.ended(tracked, blocks), told

    def clear(self) -> bool:
        """Forget all that is stored in this engine's namespaces."""
        with contextlib.suppress(BlendHubError):
            self.errands.clear()
            return True
        return False

    def close(self) -> None:
        self.errands.close()

    # Asking the hub.

    def _ask(self, tracked: Tracked) -> None:
        tracked.asked_at = time.monotonic()
        tracked.found = tracked.lookup = None
        tracked.client = self.errands.session(tracked.namespace)

    def _answered(self, tracked: Tracked) -> bool:
        """Whether the lookup has come back; waits for it for a moment. Raises if it failed or took too long."""
        started = time.monotonic()
        assert tracked.client
        try:
            client = tracked.client.result(self._patience_s)
            if tracked.lookup is None:
                wait = self._settings.lookup_timeout_s * 0.8  # what is in a store may be fetched meanwhile
                tracked.lookup = client.submit_lookup(tracked.tokens(), wait_s=wait)
            while not tracked.lookup.done():
                if time.monotonic() - started > self._patience_s:
                    break
                time.sleep(50e-6)
            if tracked.lookup.done():
                tracked.found = tracked.lookup.result()
                return True
        except TimeoutError:
            pass
        finally:
            # Shared by all requests of a step: a hundred that wait must not hold up those that run.
            self._patience_s = max(0.0, self._patience_s - (time.monotonic() - started))
        if tracked.waited() > self._settings.lookup_timeout_s:
            raise BlendHubError(f"the lookup took more than lookup_timeout_s {self._settings.lookup_timeout_s}")
        return False

    def _decide(self, tracked: Tracked, local: int) -> tuple[int, bool]:
        request = tracked.request
        decision = decide(
            tracked.matches,
            request.num_tokens,
            local,
            self._settings.policy,
            blend=tracked.mode == "blend" and can_taint(request),
            holes=self._admission.holes_for(request),
            ratio=tracked.ratio,
            usual_ratio=self._settings.recompute_ratio,
            on_the_way=tracked.found.on_the_way_tokens if tracked.found else 0,
        )
        if isinstance(decision, Refusal):
            self._refuse(tracked, decision)
            return 0, False
        tracked.decision = decision
        return decision.end - local, True

    def _refuse(self, tracked: Tracked, refusal: Refusal) -> None:
        tracked.refusal = refusal
        self._count_refusal(tracked, refusal)
        self._let_go(tracked)

    def _count_refusal(self, tracked: Tracked, refusal: Refusal) -> None:
        if refusal.code not in self._told:
            self._told.add(refusal.code)
            log.info("request %s: nothing is reused: %s", tracked.id, refusal.reason)
        self.counters[f"refused_{refusal.code}"] += 1

    def _let_go(self, tracked: Tracked) -> None:
        """End the lease that the lookup brought."""
        found, lookup = tracked.found, tracked.lookup
        tracked.lookup = None
        if found is not None and found.lease is not None:
            self.errands.quietly(tracked.namespace, partial(HubClient.release, lease=found.lease))
            tracked.found = Found(found.matches, found.pieces)
        elif found is None and lookup is not None:
            self.errands.quietly(tracked.namespace, partial(_release_late, lookup=lookup))

    # The rest.

    def _budget(self, step: SchedulerOutput) -> int:
        """How many tokens of recomputation go into a step beside what vLLM scheduled."""
        settings, most = self._settings, self._config.scheduler_config.max_num_batched_tokens
        left = most - step.total_num_scheduled_tokens
        budget = max(left, settings.min_blend_tokens_per_step)
        return min(budget, settings.blend_tokens_per_step or budget)


def _release_late(client: HubClient, lookup: PendingReply[Found]) -> None:
    """A lookup that nobody waits for any more may still bring a lease."""
    found = lookup.result()
    if found.lease is not None:
        client.release(found.lease)
