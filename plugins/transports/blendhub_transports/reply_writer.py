"""Answers on their way out of a server. Those that may wait for others travel together, as one message a peer.

What a message costs ZeroMQ, and the threads that it wakes on both sides, is more than most answers cost.
"""

import time
from collections.abc import Sequence

import zmq

from blendhub.contracts.transport import Buffer
from blendhub_transports import frames

HOLD_S = 0.002
"""Answers wait for others if some left less than this ago, and until then at most; or, if that takes longer, until
the request that is being handled is answered."""

MOST_BYTES = 2**12
"""Of answers that travel together: no client's ``max_frame_bytes`` is less."""


class ReplyWriter:
    def __init__(self, router: "zmq.Socket[bytes]") -> None:
        self._send = frames.sending(router)
        self._held: dict[bytes, bytearray] = {}
        self._hold_until = 0.0

    @property
    def held(self) -> bool:
        """Whether any wait to be sent."""
        return bool(self._held)

    def send(self, routing_id: bytes, frame: Buffer, payload: Sequence[Buffer] = ()) -> None:
        """Send one at once. A peer that is gone, or does not read, loses it."""
        self._send_now(routing_id, frame, payload)
        self._flush_if_late()

    def hold(self, routing_id: bytes, frame: bytes) -> None:
        """Send one soon, provided that ``flush`` is called whenever nothing else is to be done."""
        before = self._held.get(routing_id)
        if before is None:
            self._held[routing_id] = bytearray(frame)
        elif len(before) + len(frame) <= MOST_BYTES:
            before += frame
        else:
            self._send_now(routing_id, before)
            self._held[routing_id] = bytearray(frame)
        self._flush_if_late()

    def flush(self) -> bool:
        """Send what is held; returns whether anything was."""
        if not self._held:
            return False
        held, self._held = self._held, {}
        for routing_id, together in held.items():
            self._send_now(routing_id, together)
        self._hold_until = time.monotonic() + HOLD_S
        return True

    def _send_now(self, routing_id: bytes, frame: Buffer, payload: Sequence[Buffer] = ()) -> None:
        self._send(routing_id, frames.MORE)
        frames.send(self._send, frame, payload)

    def _flush_if_late(self) -> None:
        if self._held and time.monotonic() >= self._hold_until:
            self.flush()
