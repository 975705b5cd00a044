"""Tells what became of requests: counts it, and reports each outcome to its client, observers, the log and the hub."""

import logging
import time
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any

import msgspec

from blendhub.client.hub_client import HubClient
from blendhub.framework.observers import Observers
from blendhub.outcome.report import MAX_OUTCOMES, Outcome
from blendhub.vllm.decision import Decision, Refusal
from blendhub.vllm.hub_executor import RunCall
from blendhub.vllm.messages import LoadResult, WorkerReport
from blendhub.vllm.scheduler.request_state import RequestState
from blendhub.vllm.watching.stats import FIRST_TOKEN, Times, counts_of_load, times_of_load

log = logging.getLogger(__name__)
MOST_WAITING = 256
"""The most outcomes that wait to be sent; while the hub does not answer, the oldest are forgotten."""


class Reports:
    """Called by the scheduler's thread; waits for nothing."""

    def __init__(self, run: RunCall, observers: Observers) -> None:
        self.counters: Counter[str] = Counter()
        self.times = Times()
        self._run = run
        self._observers = observers
        self._waiting: deque[Outcome] = deque(maxlen=MOST_WAITING)
        self._is_asked = False
        """Whether the executor's thread has been asked to send the waiting outcomes."""
        self._without_token: dict[str, RequestState] = {}
        """The requests that vLLM has begun and that have no token yet."""
        self._logged: set[str] = set()
        """The reasons that were logged; each is logged once."""

    def refuse(self, state: RequestState, refusal: Refusal) -> None:
        """Refuse a request reuse, which is counted and logged."""
        state.refuse(refusal)
        if self._is_new(refusal.why):
            log.info("request %s: nothing is reused: %s", state.id, refusal.reason)
        self.counters[f"refused_{refusal.why}"] += 1

    def unreserved(self, error: BaseException) -> None:
        """Count computed KV for which the hub reserved no slots."""
        reason = type(error).__name__
        if self._is_new(reason):
            log.warning("computed KV is not stored: %s", error)
        self.counters[f"reservations_failed_{reason}"] += 1

    def count_load(self, decision: Decision, result: LoadResult) -> None:
        self.counters.update(counts_of_load(decision, result))
        for name, seconds in times_of_load(decision, result).items():
            self.times.add(name, seconds)

    def begun(self, state: RequestState) -> None:
        """Note that vLLM has begun a request; how long it waits for its first token is timed by what it reuses."""
        if not state.has_begun_to_answer:
            self._without_token[state.id] = state

    def time_first_tokens(self) -> None:
        """Called once a step, after vLLM has added the step's tokens."""
        for state in [state for state in self._without_token.values() if state.has_begun_to_answer]:
            del self._without_token[state.id]
            self.times.add(f"{FIRST_TOKEN}_{state.reuse}", time.time() - state.request.arrival_time)

    def count_work(self, report: WorkerReport) -> None:
        """Count what the workers have done in a step."""
        self.counters["saved_tokens"] += report.saved_tokens
        self.times.add("save_seconds", *report.save_seconds)
        for reason, count in report.failed_saves.items():
            self.counters[f"saves_failed_{reason}"] += count

    def response(self, state: RequestState) -> dict[str, Any]:
        """The report for the response of a request that has ended."""
        self.time_first_tokens()
        self._without_token.pop(state.id, None)
        outcome = state.outcome()
        response = {"blendhub": outcome.response(explains=state.terms.explains)}
        if log.isEnabledFor(logging.DEBUG):
            # The responses of streams and batches do not carry the report.
            log.debug("%s", msgspec.json.encode({"request": outcome.request, **response}).decode())
        return response

    def tell(self, state: RequestState) -> None:
        """Tell observers and the hub the outcome of a request that has ended, and whose repair has ended, too."""
        outcome = state.outcome()
        self._observers.request_done(outcome)
        self._waiting.append(outcome)
        if not self._is_asked:
            self._is_asked = True
            self._run(self._send).add_done_callback(self._answered)

    def _send(self, client: HubClient) -> None:
        # Before it looks what waits: a request that ends from now on asks again.
        self._is_asked = False
        while self._waiting:
            n_outcomes = min(MAX_OUTCOMES, len(self._waiting))
            client.report([self._waiting.popleft().bounded() for _ in range(n_outcomes)])

    def _answered(self, sent: "Future[None]") -> None:
        """Note the end of a message. A message that the hub refuses or misses is not repeated."""
        self._is_asked = False

    def _is_new(self, reason: str) -> bool:
        is_new = reason not in self._logged
        self._logged.add(reason)
        return is_new
