"""How many requests a server gets at a time, and the jobs that are done at that pace."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

J = TypeVar("J")
R = TypeVar("R")

FIRST, MOST = 8, 256
ROUNDS = 3
"""The rate is judged after this many times the number of requests at a time."""
FASTER = 1.1
"""A doubled number of requests at a time is kept if it brings at least this many times the tokens a second."""


class Pace:
    """The number of requests at a time: it doubles while that brings more tokens a second."""

    def __init__(self, fixed: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = fixed or FIRST
        self._grows = fixed is None
        self._clock = clock
        self._best = 0.0
        self._lock = threading.Lock()
        self._restart()

    def computed(self, tokens: int) -> None:
        """A request is answered; the server has computed so many tokens for it."""
        with self._lock:
            self._answers += 1
            self._tokens += tokens
            if self._grows and self._answers >= ROUNDS * self.limit:
                self._judge(self._tokens / max(self._clock() - self._since, 1e-9))

    def refused(self) -> None:
        """The server has refused a request because it had too many."""
        with self._lock:
            self.limit = max(1, self.limit // 2)
            self._grows = False

    def _judge(self, rate: float) -> None:
        if rate > FASTER * self._best:
            self._best = rate
            self._grows = self.limit < MOST
            self.limit = min(2 * self.limit, MOST)
        else:
            self.limit //= 2
            self._grows = False
        self._restart()

    def _restart(self) -> None:
        self._answers = self._tokens = 0
        self._since = self._clock()


def done_at_pace(jobs: Iterable[J], do: Callable[[J], R], pace: Pace, stop: threading.Event) -> Iterator[R]:
    """The results, as they come. After ``stop``, or an error of a job, no further job begins; those that run end."""
    with ThreadPoolExecutor(MOST, thread_name_prefix="blendhub-warm") as pool:
        running: set[Future[R]] = set()
        for job in jobs:
            while len(running) >= pace.limit:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
            if stop.is_set():
                break
            running.add(pool.submit(do, job))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
