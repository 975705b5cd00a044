"""A request under way, as its caller sees it."""

import threading
import time

from blendhub.contracts.transport import Envelope, Pending
from blendhub.core.errors import BlendHubError, DeadlineExceeded, InvalidInput

LONGEST_S = 30 * 86400.0


class PendingRequest(Pending):
    """Any thread may settle it, and any number of threads may wait for that."""

    def __init__(self, number: int, endpoint: str, timeout: float) -> None:
        """Raises InvalidInput unless ``timeout`` is a number of seconds to wait."""
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout <= LONGEST_S:
            raise InvalidInput(
                f"timeout = {timeout!r}, expected seconds from 0 to {LONGEST_S:.0f}: every request has a deadline"
            )
        self.number = number
        self.deadline = time.monotonic() + timeout
        self._late = f"{endpoint} did not answer within {timeout:g} s; is it overloaded, or does it stand still?"
        self._outcome: Envelope | BlendHubError | None = None
        self._is_settled = threading.Event()

    def settle(self, outcome: Envelope | BlendHubError) -> None:
        """The first outcome counts."""
        if self._outcome is None:
            self._outcome = outcome
            self._is_settled.set()

    def done(self, within: float = 0.0) -> bool:
        left = self.deadline - time.monotonic()
        if self._outcome is None and not self._is_settled.wait(max(0.0, min(within, left))) and left <= within:
            self.settle(DeadlineExceeded(self._late))
        return self._outcome is not None

    def result(self) -> Envelope:
        self.done(LONGEST_S)
        if isinstance(self._outcome, Envelope):
            return self._outcome
        assert self._outcome
        raise self._outcome
