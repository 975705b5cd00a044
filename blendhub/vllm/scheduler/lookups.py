"""The lookups of all requests, from their arrival until vLLM schedules them, however long they wait for that."""

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from blendhub.client.pending_lookup import PendingLookup
from blendhub.core.errors import BlendHubError
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.scheduler.blocks.request_blocks import RequestBlocks
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.settings import Settings
from blendhub.vllm.watching.stats import Times

T = TypeVar("T")
LOOKUP_WAIT_S = 0.002
"""How long a step waits for answers of the hub, for all requests together, before vLLM goes on to others."""

STORE_SHARE = 0.8
"""The share of the timeout that the hub may spend on reading matches from its store."""


class Lookups:
    """The lookups of an engine, for its scheduler. Its methods wait for ``LOOKUP_WAIT_S`` a step together, at most."""

    def __init__(self, executor: HubExecutor, settings: Settings, blocks: RequestBlocks, times: Times) -> None:
        self._executor = executor
        self._timeout_s = settings.lookup_timeout_s
        self._wait_left_s = LOOKUP_WAIT_S
        """The seconds that this step may still wait."""
        self._blocks = blocks
        self._times = times
        self._unanswered: list[PendingLookup] = []

    def send(self, state: RequestState, local: int | None = None, *, waits_for_store: bool = True) -> None:
        """Look up a request, or look it up again. What vLLM has is neither leased nor fetched from the store.

        ``local``: how many of the first tokens vLLM has; None: it is asked. Raises if the hub is known not to answer.
        """
        request = state.request
        if local is None and not request.skip_reading_prefix_cache:
            local = self._blocks.cached_tokens(request.block_hashes, request.num_tokens - 1)
        state.look_up()
        client = self._executor.client()
        assert client  # requests come after the first attempt to reach the hub
        state.lookup = client.lookup(
            state.tokens(),
            state.terms.variant,
            skip_prefix=local or 0,
            wait_s=self._timeout_s * STORE_SHARE if waits_for_store else 0.0,
            settled=state.terms.settled_ratio,
            timeout=self._timeout_s,
        )
        self._unanswered.append(state.lookup)

    def begin_step(self) -> None:
        """Notice which lookups were answered, and which the hub did not answer.

        So the session is mended before the turn of the requests that wait.
        """
        self._wait_left_s = LOOKUP_WAIT_S
        for lookup in self._unanswered:
            with contextlib.suppress(BlendHubError):
                lookup.answer()
        self._unanswered = [lookup for lookup in self._unanswered if not lookup.is_over]

    def has_found(self, state: RequestState, local: int) -> bool:
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
            self.send(state, local)
        elif state.stage is Stage.LOOKING_UP and lookup.lacks_some:
            self.send(state, local, waits_for_store=False)
        if state.stage is Stage.LOOKING_UP and (lookup := state.lookup):
            found = self.wait_for(lookup.answer)
            if found is None:
                return False
            self._times.add("lookup_seconds", time.monotonic() - lookup.sent_at)
            state.answered(found)
        return True

    def wait_for(self, answer: Callable[[float], T]) -> T:
        """Call what waits for the hub for so many seconds at most, with what is left to this step."""
        started = time.monotonic()
        try:
            return answer(self._wait_left_s)
        finally:
            # All requests of a step share the wait: a hundred that wait must not hold up those that run.
            self._wait_left_s = max(0.0, self._wait_left_s - (time.monotonic() - started))
