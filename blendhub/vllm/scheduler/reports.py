"""Tells what became of requests: counts it, and reports each outcome to its client, observers, the log and the hub."""

import logging
import time
from collections import Counter, deque
from typing import Any

import msgspec

from blendhub.client.hub_client import HubClient
from blendhub.core.spans import total
from blendhub.framework.observers import Observers
from blendhub.outcome.report import MAX_OUTCOMES, Outcome
from blendhub.system.recurring import RecurringWarnings
from blendhub.vllm.decision import Refusal
from blendhub.vllm.messages import LoadResult, WorkerReport
from blendhub.vllm.scheduler.outcomes import outcome_of
from blendhub.vllm.scheduler.request.reuse import Reuse
from blendhub.vllm.scheduler.request.served_request import Requests, ServedRequest
from blendhub.vllm.watching.stats import FIRST_TOKEN, Times, counts_of_load, times_of_load

log = logging.getLogger(__name__)
MAX_WAITING = 256
"""The most outcomes that wait to be sent; while the hub does not answer, the oldest are forgotten."""


class Reports:
    """Called by the scheduler's thread; waits for nothing."""

    def __init__(self, client: HubClient, observers: Observers, requests: Requests) -> None:
        self.counters: Counter[str] = Counter()
        self.times = Times()
        self._client = client
        self._observers = observers
        self._requests = requests
        self._waiting: deque[Outcome] = deque(maxlen=MAX_WAITING)
        self._warnings = RecurringWarnings(log)

    def refuse(self, request: ServedRequest, refusal: Refusal) -> None:
        """Refuse a request reuse, which is counted and logged."""
        request.reuse.refuse(refusal)
        text = f"request {request.id}: nothing is reused: {refusal.message}"
        self._warnings.warn(("refused", refusal.code), text, level=logging.INFO)
        self.counters[f"refused_{refusal.code}"] += 1

    def unreserved(self, error: BaseException) -> None:
        """Count computed KV for which the hub reserved no slots."""
        reason = type(error).__name__
        self._warnings.warn(reason, f"computed KV is not stored: {error}", error)
        self.counters[f"reservations_failed_{reason}"] += 1

    def count_load(self, reuse: Reuse, result: LoadResult) -> None:
        decision, copied, fetched = reuse.decision, reuse.copied_tokens, reuse.fetched_tokens
        assert decision
        self.counters.update(counts_of_load(decision, result))
        if not result.error:
            loaded = total(match.span for match in decision.sources)
            origins = {"engine": copied, "memory": loaded - copied - fetched, "store": fetched}
            self.counters.update({f"tokens_loaded_{name}": tokens for name, tokens in origins.items()})
        for name, seconds in times_of_load(decision, result).items():
            self.times.add(name, seconds)

    def count_work(self, report: WorkerReport) -> None:
        """Count what the workers have done in a step."""
        self.counters["saved_tokens"] += report.saved_tokens
        self.times.add("save_seconds", *report.save_seconds)
        for reason, count in report.failed_saves.items():
            self.counters[f"saves_failed_{reason}"] += count

    def begun(self, request: ServedRequest) -> None:
        """vLLM has begun a request; how long it waits for its first token is timed by what it reuses."""
        request.lacks_first_token = not request.has_begun_to_answer

    def time_first_tokens(self) -> None:
        """Called once a step, after vLLM has added the step's tokens."""
        for request in self._requests.busy.values():
            self._time_first_token(request)

    def response(self, request: ServedRequest) -> dict[str, Any]:
        """The report for the response of a request that has ended."""
        self._time_first_token(request)
        outcome = outcome_of(request)
        response = {"blendhub": outcome.response(explains=request.terms.explains)}
        if log.isEnabledFor(logging.DEBUG):
            # The responses of streams and batches do not carry the report.
            log.debug("%s", msgspec.json.encode({"request": outcome.request, **response}).decode())
        return response

    def tell(self, request: ServedRequest) -> None:
        """Tell observers and the hub the outcome of a request that has ended, and whose repair has ended, too."""
        outcome = outcome_of(request)
        self._observers.request_done(outcome)
        self._waiting.append(outcome)
        # A message that the hub refuses or misses is not repeated.
        while self._waiting and self._client.is_up:
            n_outcomes = min(MAX_OUTCOMES, len(self._waiting))
            self._client.report([self._waiting.popleft().bounded() for _ in range(n_outcomes)])

    def _time_first_token(self, request: ServedRequest) -> None:
        if request.lacks_first_token and request.has_begun_to_answer:
            request.lacks_first_token = False
            self.times.add(f"{FIRST_TOKEN}_{request.reused}", time.time() - request.request.arrival_time)
