"""The stream of what the hub stores and drops: ZeroMQ, in the format of vLLM's KV cache events."""

import itertools
import time

import msgspec

from blendhub.client.kv_events import Event, EventBatch
from blendhub.core.errors import HubError, OptionError


class EventStream:
    """A socket that many may follow. It never waits: a follower that is slow misses messages, whose numbers show it.

    A message is a topic, a number of 8 bytes and a batch in msgpack, as vLLM's own publisher sends them.
    """

    def __init__(self, endpoint: str, topic: str) -> None:
        try:
            import zmq
        except ImportError:
            raise OptionError("events needs the package pyzmq: pip install pyzmq, or leave events empty") from None
        self._topic = topic
        self._numbers = itertools.count()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise HubError(f"cannot publish events at {endpoint!r}: {error}; set events to another address") from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, model: str, event: Event) -> None:
        """Routers such as llm-d's read the model's name from the topic."""
        batch = msgspec.msgpack.encode(EventBatch(time.time(), [event]))
        self._socket.send_multipart([f"{self._topic}@{model}".encode(), next(self._numbers).to_bytes(8, "big"), batch])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
