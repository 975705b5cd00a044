"""Deadlines of requests."""

import time

from blendhub.core.errors import InvalidInput

LONGEST_S = 30 * 86400.0
NUMBER = (int, float)


def deadline_after(timeout: float) -> float:
    """A reading of ``time.monotonic``; raises InvalidInput unless ``timeout`` is a number of seconds to wait."""
    if isinstance(timeout, bool) or not isinstance(timeout, NUMBER) or not 0 <= timeout <= LONGEST_S:
        raise InvalidInput(f"timeout = {timeout!r}, expected seconds from 0 to {LONGEST_S:.0f}: every request has one")
    return time.monotonic() + timeout
