"""The lookups of all requests, from their arrival until vLLM schedules them, however long they wait for that."""

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from blendhub.client.hub_client import HubClient
from blendhub.client.session import PendingReply
from blendhub.client.wire import Found
from blendhub.core.errors import BlendHubError, DeadlineExceeded, PeerGone
from blendhub.core.layout import Variant
from blendhub.core.tokens import Tokens
from blendhub.vllm.hub_executor import HubExecutor
from blendhub.vllm.scheduler.blocks.prefix_cache import RequestBlocks
from blendhub.vllm.scheduler.request_state import RequestState, Stage
from blendhub.vllm.settings import Settings
from blendhub.vllm.watching.stats import Times

T = TypeVar("T")
LOOKUP_WAIT_S = 0.002
"""How long a step waits for answers of the hub, for all requests together, before vLLM goes on to others."""

STORE_SHARE = 0.8
"""The share of the timeout that the hub may spend on reading matches from its store."""


class Reading:
    """The lease of a lookup while workers copy what it covers."""

    def __init__(self, client: HubClient, found: Found, epoch: int) -> None:
        assert found.lease is not None
        self.lease = found.lease
        self.epoch = epoch
        self.pieces = found.pieces
        self._client = client

    def end(self) -> None:
        """End the lease of a load that failed; it may have ended. That of another load was ended by its workers."""
        with contextlib.suppress(BlendHubError):
            self._client.submit_release(self.lease)


class PendingLookup:
    """A lookup, sent at once if the session is open, otherwise by a later ``send``. Only ``answer`` waits.

    The hub has ``timeout_s`` to answer, from when the lookup was sent. An answer that came in time is kept.
    """

    def __init__(
        self,
        executor: HubExecutor,
        variant: Variant,
        tokens: Tokens,
        timeout_s: float,
        *,
        settled: float | None,
        skip_prefix: int = 0,
        waits_for_store: bool = True,
    ) -> None:
        """``settled``: the least share that was recomputed in settled KV; None: find none. ``skip_prefix``: so many
        tokens are not needed."""
        self.skip_prefix = skip_prefix
        self.waits_for_store = waits_for_store
        self._executor = executor
        self._submit = partial(
            HubClient.submit_lookup,
            tokens=tokens,
            variant=variant,
            skip_prefix=skip_prefix,
            wait_s=timeout_s * STORE_SHARE if waits_for_store else 0.0,
            settled=settled,
            timeout=timeout_s,
        )
        self._timeout_s = timeout_s
        self._begun_at = self.sent_at = time.monotonic()
        self._client: HubClient | None = None
        self._epoch = self._registration = 0
        self._reply: PendingReply[Found] | None = None
        self._found: Found | None = None
        self._error: BlendHubError | None = None
        self.send()

    def send(self) -> None:
        """Send the lookup if it was not sent yet and the session is open."""
        if self._reply or self._error:
            return
        try:
            client = self._executor.client()
            if client:
                self._client, self._epoch, self.sent_at = client, client.epoch, time.monotonic()
                self._registration = client.registrations
                self._reply = self._submit(client)
        except BlendHubError as error:
            self._error = error

    @property
    def is_sent(self) -> bool:
        return self._reply is not None

    def answer(self, within: float = 0.0) -> Found | None:
        """The hub's answer; None if there is none ``within`` so many seconds. Raises if the lookup failed."""
        if self._found is None:
            self.send()
            if self._error:
                raise self._error
            if self._reply:
                self._found = self._received(within)
            else:
                self._check_time()
        return self._found

    def _received(self, within: float) -> Found | None:
        assert self._reply and self._client
        if self._reply.done(within):
            try:
                return self._reply.result()
            except DeadlineExceeded as error:
                # Kept, because asking for the result notes each time that the hub does not answer.
                self._error = DeadlineExceeded(f"the lookup took more than lookup_timeout_s {self._timeout_s}")
                raise self._error from error
        try:
            self._client.check_up()
        except PeerGone as error:
            self._executor.release_late(self._reply)
            self._error = error
            raise
        return None

    def _check_time(self) -> None:
        if time.monotonic() - self._begun_at > self._timeout_s:
            self._error = DeadlineExceeded(
                f"the session with the hub was not open within lookup_timeout_s {self._timeout_s}"
            )
            raise self._error

    @property
    def has_ended(self) -> bool:
        """Whether the lease on the matches has ended with the session that it was asked for in."""
        return bool(self._found and self._client and self._client.registrations != self._registration)

    def begin_reading(self) -> Reading:
        """Leave the lease to the workers, which release it once all of them have copied."""
        assert self._client and self._found and self._found.lease is not None
        self._reply = None
        return Reading(self._client, self._found, self._epoch)

    def close(self) -> None:
        """End the lease that the answer brought, or still brings."""
        if self._client is None or self._reply is None or self._error:
            return
        if self._found is None:
            self._executor.release_late(self._reply)
        elif self._found.lease is not None:
            with contextlib.suppress(BlendHubError):
                self._client.submit_release(self._found.lease)
        self._reply = None


class Lookups:
    """The lookups of an engine, for its scheduler. Its methods wait for ``LOOKUP_WAIT_S`` a step together, at most."""

    def __init__(
        self,
        executor: HubExecutor,
        settings: Settings,
        requests: Mapping[str, RequestState],
        blocks: RequestBlocks,
        times: Times,
    ) -> None:
        """``requests``: those of the engine, now and later."""
        self._executor = executor
        self._timeout_s = settings.lookup_timeout_s
        self._wait_left_s = LOOKUP_WAIT_S
        """The seconds that this step may still wait."""
        self._requests = requests
        self._blocks = blocks
        self._times = times
        self._unsent: list[RequestState] = []
        """Requests whose lookups wait for a session with the hub."""

    def send(self, state: RequestState, local: int | None = None, *, waits_for_store: bool = True) -> None:
        """Look up a request, or look it up again. What vLLM has is neither leased nor fetched from the store.

        ``local``: how many of the first tokens vLLM has; None: it is asked.
        """
        request = state.request
        if local is None and not request.skip_reading_prefix_cache:
            local = self._blocks.cached_tokens(request.block_hashes, request.num_tokens - 1)
        lookup = PendingLookup(
            self._executor,
            state.terms.variant,
            state.tokens(),
            self._timeout_s,
            settled=state.terms.settled_ratio,
            skip_prefix=local or 0,
            waits_for_store=waits_for_store,
        )
        state.look_up(lookup)
        if not lookup.is_sent:
            self._unsent.append(state)

    def begin_step(self) -> None:
        """Send the lookups that waited for a session: vLLM asks for requests only at their turn."""
        self._wait_left_s = LOOKUP_WAIT_S
        waiting, self._unsent = self._unsent, []
        for state in waiting:
            if state.lookup:
                state.lookup.send()
                if not state.lookup.is_sent:
                    self._unsent.append(state)
        for state in self._requests.values():
            # A lookup that the hub did not answer is noticed now, and the session is mended before the request's turn.
            if state.stage is Stage.LOOKING_UP and state.lookup:
                with contextlib.suppress(BlendHubError):
                    state.lookup.answer()

    def has_found(self, state: RequestState, local: int) -> bool:
        """Whether the hub has said what it has behind the first ``local`` tokens. Raises if it did not in time.

        What it said long ago, while the request waited for its turn, is asked again where that may help.
        """
        is_first, state.had_its_turn = not state.had_its_turn, True
        lookup = state.lookup
        # It was preempted and lost its blocks, its session has ended, or vLLM has evicted what it had.
        if state.stage is Stage.LOADED or (lookup and (lookup.has_ended or local < lookup.skip_prefix)):
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

    def wait_for(self, answer: Callable[[float], T]) -> T:
        """Call what waits for the hub for so many seconds at most, with what is left to this step."""
        started = time.monotonic()
        try:
            return answer(self._wait_left_s)
        finally:
            # All requests of a step share the wait: a hundred that wait must not hold up those that run.
            self._wait_left_s = max(0.0, self._wait_left_s - (time.monotonic() - started))

    def _wait(self, state: RequestState) -> bool:
        """Wait a moment for the answer; returns whether it has come. Raises if the lookup failed or timed out."""
        lookup = state.lookup
        assert lookup
        found = self.wait_for(lookup.answer)
        if found is None:
            return False
        self._times.add("lookup_seconds", time.monotonic() - lookup.sent_at)
        state.answered(found)
        return True
