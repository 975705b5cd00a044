"""Match queues: the work on each namespace's matchers, in order, and never with the event loop waiting for it.

A matcher locks its table while it matches, and other callers wait for the lock. Therefore each namespace has a queue,
which does one piece of work at a time: short work on the loop itself, if the queue is idle, and long work in a thread.
Work that arrives for the same namespace meanwhile queues behind it there.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from blendhub.core.errors import BlendHubError
from blendhub.hub.limits import INLINE_TOKENS, MATCH_THREADS
from blendhub.system.processes import let_others_run_first

log = logging.getLogger(__name__)
T = TypeVar("T")
NICENESS = 5
"""The niceness of the matching threads: the loop, and an engine beside an embedded hub, run before them."""


class MatchThreads:
    """The threads that all queues share."""

    def __init__(self, inline_tokens: int = INLINE_TOKENS) -> None:
        """``inline_tokens``: the most tokens that are matched on the event loop."""
        self.inline_tokens = inline_tokens
        self._pool = ThreadPoolExecutor(
            MATCH_THREADS, "blendhub-match", initializer=partial(let_others_run_first, NICENESS)
        )

    def submit(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the hub has ended
            self._pool.submit(work)

    def close(self) -> None:
        """Begin no more work. The threads finish their current work and end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Job:
    def __init__(self, work: Callable[[], Any], n_tokens: int, answer: "asyncio.Future[Any] | None" = None) -> None:
        """``answer``: of the request that waits for the result, if one does."""
        self.work: Callable[[], Any] | None = work
        self.n_tokens = n_tokens
        self.answer = answer
        if answer:
            answer.add_done_callback(self._forget)

    def _forget(self, answer: "asyncio.Future[Any]") -> None:
        """Drop the tokens of a job whose request no longer waits, even if the job is still in the queue."""
        self.work = None


class MatchQueue:
    """The work on one namespace. All methods are for the loop's thread."""

    def __init__(self, threads: MatchThreads) -> None:
        self._threads = threads
        self._jobs: deque[_Job] = deque()
        self._in_thread = False
        self._changing = threading.Lock()
        """Held for moments only, while jobs come and go."""

    @property
    def is_idle(self) -> bool:
        """Whether no thread works on this namespace, or is going to."""
        return not self._in_thread

    def ask(self, work: Callable[[], T], n_tokens: int) -> "T | asyncio.Future[T]":
        """The result, or a future of it. ``n_tokens`` says how long the work is."""
        if self.is_idle and n_tokens <= self._threads.inline_tokens:
            return work()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue(_Job(work, n_tokens, answer))
        return answer

    def update(self, work: Callable[[], object], n_tokens: int) -> None:
        """Do the work now or, behind what is under way, later. An error is logged: no request is there to have it."""
        job = _Job(work, n_tokens)
        if self.is_idle and n_tokens <= self._threads.inline_tokens:
            _do(job)
        else:
            self._queue(job)

    def _queue(self, job: _Job) -> None:
        with self._changing:
            self._jobs.append(job)
            if not self._in_thread:
                self._in_thread = True
                self._threads.submit(self._work)

    def _work(self) -> None:
        """Do what is queued, up to the first long piece; other namespaces have the thread before the next one."""
        long = False
        while not long:
            job = self._jobs[0]
            long = job.n_tokens > self._threads.inline_tokens
            _do(job)
            with self._changing:
                self._jobs.popleft()
                if not self._jobs:
                    self._in_thread = False
                    return
        self._threads.submit(self._work)


def _do(job: _Job) -> None:
    """Do a piece of work, and hand its result to the loop if a request waits for it."""
    work = job.work
    if work is None or (job.answer and job.answer.cancelled()):
        return  # its deadline has passed
    if job.answer is None:
        try:
            work()
        except Exception as error:
            expected = isinstance(error, BlendHubError)
            log.warning("what was stored or dropped just now did not reach a matcher: %s", error, exc_info=not expected)
        return
    done: Callable[[], None]
    try:
        done = partial(job.answer.set_result, work())
    except Exception as error:
        done = partial(job.answer.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop has ended
        job.answer.get_loop().call_soon_threadsafe(_settle, job.answer, done)


def _settle(answer: "asyncio.Future[Any]", done: Callable[[], None]) -> None:
    if not answer.done():  # else its deadline has passed
        done()
