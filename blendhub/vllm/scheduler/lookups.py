"""The lookups of all requests, from their arrival until vLLM schedules them, however long they wait for that."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vllm.v1.core.kv_cache_utils import BlockHash

from blendhub.core.errors import BlendHubError
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.scheduler.lookup import Lookup
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.settings import Settings

RENEW_S = 1.0
"""How often the leases of requests that wait for their turn are looked at."""


class Lookups:
    """The lookups of an engine, for its scheduler. Only ``has_found`` waits, at most ``lookup_wait_ms`` a step."""

    def __init__(
        self,
        executor: HubExecutor,
        settings: Settings,
        least_ratio: Callable[[RequestState], float | None],
        counters: Counter[str],
    ) -> None:
        """``least_ratio``: the least share that must have been recomputed in settled KV of a request; None: it takes
        none."""
        self.engine_cached: Callable[[Sequence[BlockHash], int], int | None] = lambda hashes, most: None
        """How many tokens vLLM has cached under these hashes, at most so many; None: this vLLM cannot be asked."""
        self._executor = executor
        self._timeout_s = settings.lookup_timeout_s
        self._wait_s = self._wait_left_s = settings.lookup_wait_ms / 1000
        """The seconds that a step may wait, and the seconds that are left of them."""
        self._least_ratio = least_ratio
        self._counters = counters
        self._unsent: list[RequestState] = []
        """Requests whose lookups wait for a session with the hub."""
        self._renew_at = 0.0

    def send(self, state: RequestState, local: int | None = None, *, waits_for_store: bool = True) -> None:
        """Look up a request, or look it up again. What vLLM has is neither leased nor fetched from the store.

        ``local``: how many of the first tokens vLLM has; None: it is asked.
        """
        request = state.request
        if local is None and not request.skip_reading_prefix_cache:
            local = self.engine_cached(request.block_hashes, request.num_tokens - 1)
        lookup = Lookup(
            self._executor,
            state.terms.variant,
            state.tokens(),
            self._timeout_s,
            settled=self._least_ratio(state),
            skip_prefix=local or 0,
            waits_for_store=waits_for_store,
        )
        state.look_up(lookup)
        if not lookup.is_sent:
            self._unsent.append(state)

    def begin_step(self, requests: Iterable[RequestState]) -> None:
        """Send the lookups that waited for a session, and renew leases: vLLM asks for requests only at their turn."""
        self._wait_left_s = self._wait_s
        waiting, self._unsent = self._unsent, []
        for state in waiting:
            if state.lookup:
                state.lookup.send()
                if not state.lookup.is_sent:
                    self._unsent.append(state)
        if time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + RENEW_S
            for state in requests:
                if state.stage in (Stage.LOOKING_UP, Stage.FOUND) and state.lookup and state.lookup.expires_soon:
                    self.send(state)

    def has_found(self, state: RequestState, local: int) -> bool:
        """Whether the hub has said what it has behind the first ``local`` tokens. Raises if it did not in time.

        What it said long ago, while the request waited for its turn, is asked again where that may help.
        """
        is_first, state.had_its_turn = not state.had_its_turn, True
        lookup = state.lookup
        # It was preempted and lost its blocks, the lease has expired, or vLLM has evicted what it had.
        if state.stage is Stage.LOADED or (lookup and (lookup.has_expired or local < lookup.skip_prefix)):
            self.send(state, local)
        if state.stage is not Stage.LOOKING_UP:
            return True
        try:
            if not self._wait(state):
                return False
        except BlendHubError:
            if not is_first:
                raise
            # It failed while the request waited for its turn; the hub may answer by now.
            self.send(state, local)
            return self._wait(state)
        if state.found and state.found.on_the_way_tokens and state.lookup and state.lookup.waits_for_store:
            # More of it may have come from the store by now.
            self.send(state, local, waits_for_store=False)
            return self._wait(state)
        return True

    def _wait(self, state: RequestState) -> bool:
        """Wait a moment for the answer; returns whether it has come. Raises if the lookup failed or timed out."""
        started = time.monotonic()
        assert state.lookup
        try:
            while (found := state.lookup.answer()) is None and time.monotonic() - started < self._wait_left_s:
                time.sleep(50e-6)
        finally:
            # All requests of a step share the wait: a hundred that wait must not hold up those that run.
            self._wait_left_s = max(0.0, self._wait_left_s - (time.monotonic() - started))
        if found is None:
            return False
        self._counters["lookup_microseconds"] += round((time.monotonic() - state.lookup.sent_at) * 1e6)
        state.answered(found)
        return True
