"""Reading ZeroMQ sockets from an asyncio loop, without a thread and without zmq.asyncio's price."""

import asyncio
from collections.abc import Callable

import zmq

EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
BATCH = 64
"""How much is read in one go before others on the loop get their turn."""


def nothing_more() -> None:
    """For inlets that need not know when all is read."""


class Inlet:
    """Calls ``read`` for each message that waits at ``socket``, then ``drained`` when none is left.

    ``read`` takes one message off the socket, and lets zmq.Again pass. ZeroMQ's descriptor
    tells only that something changed, and any use of the socket may swallow that news: so each turn reads
    until nothing is left, and whoever sends on the socket outside of ``read`` calls ``look`` afterwards.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", read: Callable[[], None], drained: Callable[[], None] = nothing_more
    ) -> None:
        self._socket = socket
        self._read = read
        self._drained = drained
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.getsockopt(zmq.FD)
        self._reading = False
        self._soon: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._turn)
        self.rouse()

    def look(self) -> None:
        """Have what waits read, if anything does."""
        if not self._reading and self._socket.getsockopt(EVENTS) & POLLIN:
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
        self._reading = True
        try:
            for _ in range(BATCH):
                self._read()
        except zmq.Again:
            self._drained()
        except BaseException:
            # The descriptor will not tell again of what is still there.
            self.rouse()
            raise
        else:
            self.rouse()
        finally:
            self._reading = False
