"""Scheduler side of loading: looks up what the hub has, decides what each request reuses of it, and plans the loads."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np

from blendhub.client.hub_client import PendingLookup
from blendhub.client.wire import Found
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone
from blendhub.outcome.reasons import Why
from blendhub.vllm.decision import Choice, Refusal
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.messages import LoadJob, LoadResult, LoadSource
from blendhub.vllm.scheduler.blend_queue import BlendQueue
from blendhub.vllm.scheduler.blocks.request_blocks import RequestBlocks, Tables
from blendhub.vllm.scheduler.blocks.scratch import Scratch
from blendhub.vllm.scheduler.blocks.settled_blocks import SettledBlocks
from blendhub.vllm.scheduler.blocks.shown_hashes import ShownHashes
from blendhub.vllm.scheduler.decide import BlendTerms, EngineLimits, decide
from blendhub.vllm.scheduler.reports import Reports
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.scheduler.startup import StartupFacts

LOOKUP_WAIT_S, LOOKUP_WAIT_SHARE = 0.002, 0.1
"""How long a step waits for answers of the hub, for all requests together, before vLLM goes on to others: this, or this
share of the least forward, if that is longer. A request without an answer waits for a whole step.
"""

STORE_SHARE = 0.8
"""The share of a lookup's timeout that the hub may spend on reading matches from its store."""


class LoadScheduler:
    """All methods are called by the scheduler's thread. Only ``matched`` waits, at most ``wait_left_s`` a step."""

    def __init__(
        self,
        facts: StartupFacts,
        executor: HubExecutor,
        blocks: RequestBlocks,
        scratch: Scratch,
        queue: BlendQueue,
        reports: Reports,
    ) -> None:
        self._executor = executor
        self._blocks = blocks
        self.settled = SettledBlocks(blocks)
        self._scratch = scratch
        self._queue = queue
        self._reports = reports
        self._settings = facts.settings
        self._costs = facts.costs if facts.settings.policy.min_reused_tokens is None else None
        self._block_size = blocks.hash_block_size
        self._n_positions = facts.max_model_len
        """Keys that were stored for this position or a later one cannot be moved: tables of rotations are as long."""
        self._looks_ahead = facts.looks_ahead
        self._shown = ShownHashes(self._block_size) if facts.shows_hashes else None
        """Only if another connector stores KV under block hashes."""
        self._reading: dict[str, PendingLookup] = {}
        """The lookups whose leases workers copy under, by request; a request may have been aborted meanwhile."""
        self._unanswered: list[PendingLookup] = []
        self._waits_until = 0.0
        """When this step ceases to wait for the hub; 0: it has not begun to wait."""
        self._begun_at = time.monotonic()
        self._steps_s = deque([0.0], maxlen=8)
        """How long the last steps took. The shortest has computed no prompt, or as little as those now."""

    def look_up(self, state: RequestState, local: int | None = None, *, waits_for_store: bool = True) -> PendingLookup:
        """Look up a request, or look it up again. What vLLM has is neither leased nor fetched from the store.

        ``local``: how many of the first tokens vLLM has; None: it is asked. Raises if the hub is known not to answer.
        """
        request, timeout_s = state.request, self._settings.lookup_timeout_s
        if local is None and not request.skip_reading_prefix_cache:
            local = self._blocks.cached_tokens(request.block_hashes, request.num_tokens - 1)
        state.look_up()
        if self._executor.is_clearing:
            raise PeerGone("the hub has not cleared the cache yet")
        state.lookup = self._executor.client.lookup(
            state.tokens(),
            state.terms.variant,
            skip_prefix=local or 0,
            wait_s=timeout_s * STORE_SHARE if waits_for_store else 0.0,
            settled=state.terms.settled_ratio,
            timeout=timeout_s,
        )
        self._unanswered.append(state.lookup)
        return state.lookup

    @property
    def wait_left_s(self) -> float:
        """How long this step may still wait for the hub: many requests that wait must not hold up those that run."""
        if not self._waits_until:
            least_s = self._costs.prefill.seconds(0) if self._costs else 0.0
            self._waits_until = time.monotonic() + max(LOOKUP_WAIT_S, LOOKUP_WAIT_SHARE * least_s)
        return max(0.0, self._waits_until - time.monotonic())

    def matched(self, state: RequestState, local: int) -> tuple[int | None, bool]:
        """The number of tokens after the first ``local`` that are loaded; None: ask again in a later step."""
        request = state.request
        # While it waited, other requests have settled what it repeats, or vLLM has evicted that.
        # Other connectors may have kept the hashes that they have seen.
        is_open = not state.is_scheduled and not state.shown_exact
        if is_open and self.settled.take(state):
            return None, False  # vLLM has to look into its cache again
        state.engine_tokens = local
        if request.skip_reading_prefix_cache and not state.refusal:
            self._reports.refuse(
                state, Refusal(Why.ALL_COMPUTED, "the request needs every token computed, as prompt logprobs do")
            )
        if state.stage is not Stage.COMPUTING:
            try:
                if not self._has_found(state, local):
                    return None, False
            except BlendHubError as error:
                is_late = isinstance(error, DeadlineExceeded)
                hint = "; lookup_timeout_s says how long a lookup may take" if is_late else ""
                self._reports.refuse(state, Refusal(Why.HUB_FAILED, f"{type(error).__name__}: {error}{hint}"))
            else:
                if not self._decide(state):
                    return None, False
        if state.stage is Stage.FOUND:
            assert state.decision
            if self._shown:
                self._shown.show(state, state.decision.first_approximate)
            return state.decision.end - local, True
        if self._queue.must_wait(request, request.num_tokens - local):
            return None, False
        if self._shown:
            self._shown.show(state, None)
        return 0, False

    def allocated(self, state: RequestState, tables: Tables, n_external: int) -> LoadJob | None:
        """Note that vLLM has allocated blocks for the tokens that ``matched`` returned; returns the load, if any."""
        if not state.is_scheduled:
            state.scheduled()
            self._queue.scheduled(state)
            self._reports.counters["tokens_settled"] += len(state.settled_span or ())
            state.receive(self._block_size)
        decision = state.decision
        if decision is None:
            return None
        if not n_external:
            if state.stage is Stage.FOUND:
                self._reports.refuse(state, Refusal(Why.OTHER_CONNECTOR, Why.OTHER_CONNECTOR.sentence))
            return None
        claimed = decision.end - state.engine_tokens
        assert n_external == claimed, f"vLLM takes {n_external} of the {claimed} tokens that BlendHub has claimed"
        reading = self._reading[state.id] = state.begin_load()
        assert reading.reply and reading.reply.lease is not None
        self._scratch.allocated(state.id)
        if n_recomputed := math.ceil(decision.recomputed_at(decision.ratio)):
            self._queue.begin(state.request, n_recomputed)
        is_salted = self._shown is not None and self._shown.is_salted(state)
        if decision.first_approximate is not None and not is_salted:
            state.salt(decision.first_approximate, self._block_size)
        return LoadJob(
            state.id,
            state.tokens(),
            tuple(np.asarray(blocks, np.int64) for blocks in self._scratch.complete(state.id, tables)),
            decision,
            LoadSource(reading.reply.lease, reading.request.epoch, decision.pieces_of(reading.reply.pieces)),
            state.terms.adapter,
        )

    def begin_step(self, n_scheduled: int) -> int:
        """A step is planned, in which vLLM computes so many tokens; returns how many are recomputed at most."""
        self._queue.next_step()
        self._waits_until = 0.0
        now = time.monotonic()
        self._steps_s.append(now - self._begun_at)
        self._begun_at = now
        if self._costs:
            # Where vLLM had nothing to do, a pause is no step: what takes longer than the least forward does not count.
            step = min(*self._steps_s, self._costs.prefill.seconds(0))
            self._costs = msgspec.structs.replace(self._costs, step=step)
        # The session is mended before the turn of requests that wait, if the hub has not answered one of them.
        for lookup in self._unanswered:
            if lookup.done():
                with contextlib.suppress(BlendHubError):
                    lookup.result()
        self._unanswered = [lookup for lookup in self._unanswered if not (lookup.reply or lookup.error)]
        if self._shown:
            self._shown.end_step()
        return self._queue.budget(n_scheduled)

    def loaded(self, request: str, state: RequestState | None, result: LoadResult) -> None:
        """Take note of how a load has ended; ``state`` is None if the request has ended, too."""
        reading = self._reading.pop(request, None)
        if reading and result.error:
            reading.close()  # it may have ended; that of another load was ended by its workers
        if state and not result.error:
            self._scratch.loaded(request)
        else:
            self._scratch.give_back(request)
        if reading and state and state.stage is Stage.LOADING:
            state.end_load(result)
            self._queue.end(state.request)
            assert state.decision
            self._reports.count_load(state.decision, result)
            self.settled.remember(state)

    def ended(self, state: RequestState) -> None:
        """Note that a request has ended, or was aborted."""
        self._queue.end(state.request)
        self._scratch.ended(state.id)
        state.end_lookup()
        if state.stage is not Stage.LOADING:
            self.settled.remember(state)

    def clear(self, states: Iterable[RequestState]) -> None:
        """Forget what vLLM and the hub had, both to be cleared; what waits is looked up again at its turn."""
        self.settled.clear()
        for state in states:
            if state.stage in (Stage.LOOKING_UP, Stage.FOUND):
                state.look_up()

    def _has_found(self, state: RequestState, local: int) -> bool:
        """Whether the hub has said what it has behind the first ``local`` tokens. Raises if it did not in time.

        What it said long ago, while the request waited for its turn, is asked again where that may help.
        """
        is_first, state.had_its_turn = not state.had_its_turn, True
        lookup = state.lookup
        if (
            lookup is None  # it was preempted and lost its blocks, or the hub could not be asked
            or lookup.has_ended
            or local < lookup.request.skip_prefix_n_tokens  # vLLM has evicted what it had
            or (is_first and lookup.error)  # the hub may answer by now
        ):
            lookup = self.look_up(state, local)
        elif state.stage is Stage.LOOKING_UP and lookup.lacks_some:
            lookup = self.look_up(state, local, waits_for_store=False)
        if state.stage is Stage.LOOKING_UP:
            if not lookup.done(self.wait_left_s):
                self._executor.client.check_up()
                return False
            state.answered(lookup.result())
            self._reports.times.add("lookup_seconds", time.monotonic() - lookup.sent_at)
        return True

    def _decide(self, state: RequestState) -> bool:
        """Decide what a request reuses; returns False if it must wait for scratch that others use."""
        for has_scratch in (True, False):
            choice = self._choice(state, has_scratch)
            first = choice.decision.first_approximate if choice.decision else None
            if self._shown and first is not None and first < state.shown_exact:
                choice = self._choice(state, has_scratch, moves=False)
            decision = choice.decision
            state.decided(choice)
            is_lent = self._scratch.borrow(state)
            if is_lent is None:
                return False
            if is_lent:
                break
        if decision is None:
            assert choice.refusal
            self._reports.refuse(state, choice.refusal)
        return True

    def _choice(self, state: RequestState, has_scratch: bool, *, moves: bool = True) -> Choice:
        """What to reuse of what was found."""
        return decide(
            state.found or Found(),
            state.request.num_tokens,
            state.engine_tokens,
            self._settings.policy,
            BlendTerms(
                state.can_blend and moves, state.terms.fills_holes, state.terms.ratio, self._settings.recompute_ratio
            ),
            EngineLimits(self._n_positions, self._costs, has_scratch, self._looks_ahead),
        )
