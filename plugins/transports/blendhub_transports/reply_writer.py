"""Encodes the replies and errors of a server and sends them through its ROUTER."""

import logging
from collections.abc import Sequence

import zmq

from blendhub.contracts.transport import Buffer, Codec, Envelope
from blendhub.core.errors import BlendHubError
from blendhub_transports import frames
from blendhub_transports.error_codec import encode_error, service_failure
from blendhub_transports.options import ZmqOptions

log = logging.getLogger("blendhub.transports")


class ReplyWriter:
    def __init__(self, router: "zmq.Socket[bytes]", codec: Codec, options: ZmqOptions, endpoint: str) -> None:
        self._router = router
        self._codec = codec
        self._options = options
        self._endpoint = endpoint

    def write(self, routing_id: bytes, number: int, outcome: Envelope | BlendHubError) -> None:
        """Answer the request ``number`` of that client. A client that left, or does not read, loses the answer."""
        # Encoded and checked as a whole before the first frame leaves: half an answer cannot be taken back.
        frame, payload = self._encode(number, outcome)
        self._router.send(routing_id, frames.MORE)
        frames.send(self._router, frame, payload)

    def _encode(self, number: int, outcome: Envelope | BlendHubError) -> tuple[bytes, Sequence[Buffer]]:
        version, options = self._codec.version, self._options
        if isinstance(outcome, Envelope):
            try:
                frame = frames.answer(version, number, frames.REPLY, self._codec.encode(outcome.message))
                frames.check_sendable(frame, outcome.payload, options.max_frame_bytes, options.max_payload_frames)
                return frame, outcome.payload
            except Exception as error:
                log.exception("%s: a reply of %s cannot be sent", self._endpoint, type(outcome.message).__name__)
                outcome = service_failure(error)
        return frames.answer(version, number, frames.ERROR, encode_error(outcome)), ()
