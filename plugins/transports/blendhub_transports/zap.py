"""Decides which CURVE keys may connect: a ZAP handler (ZeroMQ RFC 27) on the server's own event loop."""

import logging

import zmq

from blendhub_transports.receiver import Receiver

log = logging.getLogger("blendhub.transports")

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"blendhub"


class ZapHandler:
    """Accepts clients whose key is listed. Create it before the server's socket is bound."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: frozenset[bytes]) -> None:
        self._allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ADDRESS)
        self._receiver = Receiver(self._socket, self._decide)

    def close(self) -> None:
        self._receiver.close()
        self._socket.close()

    def _decide(self) -> None:
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        version, request, domain, address, _, mechanism, *credentials = frames
        allowed = domain == DOMAIN and mechanism == b"CURVE" and credentials[0] in self._allowed
        if not allowed:
            log.warning("refused a connection from %s: its key is not listed", address.decode(errors="replace"))
        status = (b"200", b"OK") if allowed else (b"400", b"this key is not listed")
        self._socket.send_multipart([version, request, *status, b"", b""])
