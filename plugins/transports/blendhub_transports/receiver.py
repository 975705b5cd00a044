"""Reads ZeroMQ sockets on an asyncio loop, without a thread and without the cost of zmq.asyncio."""

import asyncio
from collections.abc import Callable

import zmq

from blendhub_transports.sockets import readable

BATCH = 64
"""Messages that are read in one turn before other callbacks of the loop run."""


class Receiver:
    """Calls ``read`` for each message that waits at ``socket``, then ``drained`` when none is left.

    ``read`` takes one message off the socket.

    ZeroMQ's descriptor signals a change once, and any use of the socket may consume that signal. So each turn reads
    until no message is left, and code that sends on the socket outside of ``read`` calls ``check`` afterwards.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", read: Callable[[], None], drained: Callable[[], None] = lambda: None
    ) -> None:
        self._socket = socket
        self._read = read
        self._drained = drained
        self._reading = False
        self._scheduled: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.getsockopt(zmq.FD)
        self._loop.add_reader(self._descriptor, self._turn)
        self.schedule()

    def check(self) -> None:
        """Schedule a turn if a message waits."""
        if not self._reading and readable(self._socket):
            self.schedule()

    def schedule(self) -> None:
        """Schedule a turn, even if no message waits."""
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._turn)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _turn(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        self._reading, finished = True, False
        try:
            finished = self._read_batch()
        finally:
            self._reading = False
            if not finished:
                # The descriptor does not signal the messages that are still there a second time.
                self.schedule()

    def _read_batch(self) -> bool:
        """Read what waits, but no more than a batch; returns whether that was all."""
        for _ in range(BATCH):
            # Asked first, since an exception where nothing waits costs more than reading.
            if not readable(self._socket):
                self._drained()
                return True
            self._read()
        return False
