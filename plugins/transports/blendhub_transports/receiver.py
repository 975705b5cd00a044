"""Reading ZeroMQ sockets from an asyncio loop, without a thread and without zmq.asyncio's price."""

import asyncio
import time
from collections.abc import Callable

import zmq

EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
AT_ONCE, WAITING = int(zmq.NOBLOCK), 0
BATCH = 64
"""How much is read in one go before others on the loop get their turn."""

LINGER_MS = 1
"""How long a turn waits for another message, and how long it goes on waiting: twice that is what others may lose."""


def nothing_more() -> None:
    """For receivers that need not know when all is read."""


def nothing_held() -> bool:
    """For receivers whose readers hold nothing back."""
    return False


def never() -> bool:
    """For receivers that do not linger."""
    return False


class Receiver:
    """Calls ``read`` for each message that waits at ``socket``, then ``drained`` when none is left.

    ``read`` takes one message off the socket, with the flags that it is given, and lets zmq.Again pass. ZeroMQ's
    descriptor tells only that something changed, and any use of the socket may swallow that news: so each turn reads
    until nothing is left, and whoever sends on the socket outside of ``read`` calls ``look`` afterwards.

    ``flush`` sends what ``read`` held back, before the turn waits, or ends; it returns whether there was anything.

    After a message, and while ``may_linger`` says so, a turn waits a moment for the next one: who was answered often
    asks again at once, and the way back through the loop takes longer than the answer.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        read: Callable[[int], None],
        drained: Callable[[], None] = nothing_more,
        flush: Callable[[], bool] = nothing_held,
        may_linger: Callable[[], bool] = never,
    ) -> None:
        self._socket = socket
        self._read = read
        self._drained = drained
        self._flush = flush
        self._may_linger = may_linger
        socket.setsockopt(zmq.RCVTIMEO, LINGER_MS)
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.getsockopt(zmq.FD)
        self.reading = False  # while it is, flush will be called
        self._soon: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._turn)
        self.rouse()

    def look(self) -> None:
        """Have what waits read, if anything does."""
        if not self.reading and self._socket.getsockopt(EVENTS) & POLLIN:
            self.rouse()

    def rouse(self) -> None:
        """Have a turn, even if nothing waits."""
        if self._soon is None:
            self._soon = self._loop.call_soon(self._turn)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._soon is not None:
            self._soon.cancel()

    def _turn(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self.reading = True
        try:
            self._read_on()
        except BaseException:
            # The descriptor will not tell again of what is still there.
            self.rouse()
            raise
        finally:
            self.reading = False

    def _read_on(self) -> None:
        flags, until = AT_ONCE, time.monotonic() + LINGER_MS / 1000
        for _ in range(BATCH):
            try:
                self._read(flags)
            except zmq.Again:
                if not self._flush():
                    self._drained()
                    return
            flags = WAITING if self._may_linger() and time.monotonic() < until else AT_ONCE
        self._flush()
        self.rouse()
