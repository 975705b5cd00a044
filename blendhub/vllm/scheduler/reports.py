"""Tells the outcome of each request: to its client, to observers, to the log, and to the hub for `blendhub explain`."""

import logging
from collections import deque
from concurrent.futures import Future
from typing import Any

import msgspec

from blendhub.client.hub_client import HubClient
from blendhub.framework.observers import Observers
from blendhub.outcome.report import MOST_REPORTS, Outcome
from blendhub.vllm.hub_executor import RunCall

log = logging.getLogger(__name__)
MOST_WAITING = 256
"""The most outcomes that wait to be sent; while the hub does not answer, the oldest are forgotten."""


class Reports:
    """Called by the scheduler's thread; waits for nothing."""

    def __init__(self, run: RunCall, observers: Observers) -> None:
        self._run = run
        self._observers = observers
        self._waiting: deque[Outcome] = deque(maxlen=MOST_WAITING)
        self._is_asked = False
        """Whether the executor's thread has been asked to send the waiting outcomes."""

    def ended(self, outcome: Outcome, *, explains: bool) -> dict[str, Any]:
        """Tell the outcome of a request that has ended; returns the report for the response."""
        report = outcome.report(explains=explains)
        self._observers.request_done(report)
        self._waiting.append(outcome)
        if not self._is_asked:
            self._is_asked = True
            self._run(self._send).add_done_callback(self._answered)
        # Clients inside this process get the lists that JSON has, not tuples.
        facts = msgspec.json.decode(msgspec.json.encode(report))
        response = {"blendhub": {name: facts[name] for name in facts if name not in ("request", "prompt_tokens")}}
        if log.isEnabledFor(logging.DEBUG):
            # The responses of streams and batches do not carry the report.
            log.debug("%s", msgspec.json.encode({"request": outcome.request, **response}).decode())
        return response

    def _send(self, client: HubClient) -> None:
        # Before it looks what waits: a request that ends from now on asks again.
        self._is_asked = False
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(MOST_REPORTS, len(self._waiting)))]
            client.report_prompts([outcome.note() for outcome in some])

    def _answered(self, sent: "Future[None]") -> None:
        """Note the end of a message. A message that the hub refuses or misses is not repeated."""
        self._is_asked = False
