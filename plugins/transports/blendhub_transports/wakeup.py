"""Deadlines, and what threads sleep on until a request's outcome is there."""

import os
import time
from queue import Empty, SimpleQueue
from typing import TypeAlias

from blendhub.errors import InvalidInput

LONGEST_S = 30 * 86400.0
NUMBER = (int, float)

Event: TypeAlias = "SimpleQueue[None]"
"""What a waiting thread sleeps on. Ringing it early, or twice, does no harm."""


class Wake:
    """Ends the sleep of a thread that waits for sockets."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def up(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def slept(self) -> None:
        """The news was taken."""
        os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        os.close(self.descriptor)


def deadline_after(timeout: float) -> float:
    """A reading of ``time.monotonic``; raises InvalidInput for what is no number of seconds to wait."""
    if isinstance(timeout, bool) or not isinstance(timeout, NUMBER) or not 0 <= timeout <= LONGEST_S:
        raise InvalidInput(f"timeout = {timeout!r}, expected seconds from 0 to {LONGEST_S:.0f}: every request has one")
    return time.monotonic() + timeout


def sleep_on(event: Event, deadline: float) -> bool:
    """Whether the event rang before the deadline."""
    try:
        event.get(timeout=max(0.0, deadline - time.monotonic()))
    except Empty:
        return False
    return True
