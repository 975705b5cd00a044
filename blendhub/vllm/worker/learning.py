"""Reports to the hub what recomputation has shown of tokens' sensitivity, off the engine's thread."""

import logging
import threading
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import StaleEpoch
from blendhub.vllm.hub_executor import RunCall
from blendhub.vllm.messages import LoadJob
from blendhub.vllm.worker.comparison import ComparedTokens

log = logging.getLogger(__name__)
MOST_WAITING = 64
"""Reports that wait for the device or the hub. One more is dropped, and counted."""


class _Report(NamedTuple):
    job: LoadJob
    comparisons: list[ComparedTokens]

    @property
    def n_tokens(self) -> int:
        return sum(len(comparison.positions) for comparison in self.comparisons)


class Learning:
    """The reports of a worker. ``add`` and ``advance`` are for the engine's thread, and wait for nothing."""

    def __init__(self, run: RunCall) -> None:
        self._run = run
        self._arriving: list[_Report] = []
        self._state = threading.Lock()
        """Guards the next three fields."""
        self._sending = 0
        self._learned = self._unlearned = 0
        self._logged = False

    def add(self, job: LoadJob, comparisons: list[ComparedTokens]) -> None:
        """Report the comparisons of a load that has succeeded."""
        report = _Report(job, comparisons)
        with self._state:
            is_full = len(self._arriving) + self._sending >= MOST_WAITING
        if is_full:
            self.count(unlearned=report.n_tokens)
            return
        self._arriving.append(report)
        self.advance()

    def advance(self) -> None:
        """Send the comparisons that have come from the device."""
        while self._arriving and all(one.found() is not None for one in self._arriving[0].comparisons):
            report = self._arriving.pop(0)
            with self._state:
                self._sending += 1
            self._run(partial(_send, report)).add_done_callback(partial(self._sent, report))

    def take_numbers(self) -> tuple[int, int]:
        """How many tokens the hub took note of since the last call, and how many it did not."""
        with self._state:
            learned, unlearned = self._learned, self._unlearned
            self._learned = self._unlearned = 0
        return learned, unlearned

    def count(self, *, learned: int = 0, unlearned: int = 0) -> None:
        """Count tokens of which the hub took note, and tokens of which it did not. For any thread."""
        with self._state:
            self._learned += learned
            self._unlearned += unlearned

    def failed(self, request: str, n_tokens: int, error: BaseException) -> None:
        """A report of so many tokens failed. For any thread."""
        with self._state:
            self._unlearned += n_tokens
            is_first, self._logged = not self._logged, True
        if is_first:
            log.warning("the hub did not learn how sensitive the tokens of request %s are: %s", request, error)

    def _sent(self, report: _Report, sent: "Future[None]") -> None:
        with self._state:
            self._sending -= 1
        error = sent.exception()
        if error is None:
            self.count(learned=report.n_tokens)
        else:
            self.failed(report.job.request, report.n_tokens, error)


def _send(report: _Report, client: HubClient) -> None:
    # In another epoch the same names mean other runs.
    if client.epoch != report.job.epoch:
        raise StaleEpoch("the hub was restarted since the tokens were loaded")
    matches = [match for match in report.job.decision.matches if match.moved]
    measured = np.zeros(matches[-1].span.end, np.uint8)
    for comparison in report.comparisons:
        found = comparison.found()
        assert found is not None
        measured[comparison.positions] = found
    client.learn(matches, measured.data, report.job.variant)
