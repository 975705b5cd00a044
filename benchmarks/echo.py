"""A bare ZeroMQ echo, the floor that the hub's transport is held against: no protocol, no state, no checks."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import Any

import zmq


def serve(endpoint: str, ready: Any) -> None:
    """A ROUTER that sends back what it gets."""
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    ready.set()
    while True:
        socket.send_multipart(socket.recv_multipart())


@contextlib.contextmanager
def running(endpoint: str) -> Iterator[None]:
    """The echo in a separate process."""
    processes = multiprocessing.get_context("spawn")
    ready = processes.Event()
    process = processes.Process(target=serve, args=(endpoint, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(60):
            raise SystemExit("the echo did not start")
        yield
    finally:
        process.kill()
        process.join()


class Caller:
    """A DEALER that sends a request and waits for it to come back."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def __call__(self, *frames: Any) -> list[bytes]:
        self.socket.send_multipart(frames)
        return self.socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)
