"""The resources of a zmq server: a bound ROUTER, its monitor, its ZAP handler, its socket file."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import zmq

from blendhub.core.errors import InvalidInput, OptionError
from blendhub_transports.endpoints import Endpoint
from blendhub_transports.keys import read_clients, read_secret
from blendhub_transports.options import ZmqOptions
from blendhub_transports.socket_file import SocketFile
from blendhub_transports.sockets import Receiver, open_monitor, set_limits

log = logging.getLogger("blendhub.transports")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"blendhub"

HANDSHAKE_MS = 5000
"""A connection that is not set up by then is closed. ZeroMQ's default is 30 seconds."""

MOST_UNREAD = 32
"""Requests of a connection that ZeroMQ receives before the event loop has read them. They may be large: others wait in
their client, which gets Busy at its HIGH_WATER_MARK."""


class Listener:
    """``router`` is bound, ``monitor`` reports its connections, ``endpoint`` has the port that was picked."""

    router: "zmq.Socket[bytes]"
    monitor: "zmq.Socket[bytes]"
    endpoint: str

    def __init__(self, where: Endpoint, options: ZmqOptions) -> None:
        self._linger_ms = round(options.linger_s * 1000)
        with contextlib.ExitStack() as opened:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            broken = opened.enter_context(contextlib.ExitStack())
            broken.callback(self._context.destroy, linger=0)
            self.router = self._context.socket(zmq.ROUTER)
            set_limits(self.router, options, where)
            self.router.setsockopt(zmq.RCVHWM, MOST_UNREAD)
            self.router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            if where.path is None and (options.secret_key or not where.private):
                opened.callback(_require_keys(self.router, where, options).close)
            # Before the first connection, whose event would be lost otherwise.
            self.monitor = open_monitor(self.router)
            if where.path is not None:
                file = SocketFile(where.path)
                opened.callback(file.remove)
                self.router.setsockopt(zmq.USE_FD, file.descriptor)
            self.endpoint = _bind(self.router, where)
            broken.pop_all()
            self._opened = opened.pop_all()

    async def close(self) -> None:
        """Send the last replies, and release everything."""
        self._opened.close()
        self.router.disable_monitor()
        self.monitor.close()
        self.router.close(linger=self._linger_ms)
        # The context waits until the last replies are sent; the port is free only after it has ended.
        with ThreadPoolExecutor(1) as waiter:
            await asyncio.get_running_loop().run_in_executor(waiter, self._context.term)


class ZapHandler:
    """Decides by CURVE keys who may connect (ZeroMQ RFC 27), on the server's event loop. Create it before the server's
    socket is bound.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", allowed: frozenset[bytes]) -> None:
        self._allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        self._receiver = Receiver(self._socket, self._decide)

    def close(self) -> None:
        self._receiver.close()
        self._socket.close()

    def _decide(self) -> None:
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        version, request, domain, address, _, mechanism, *credentials = frames
        allowed = domain == ZAP_DOMAIN and mechanism == b"CURVE" and credentials[0] in self._allowed
        if not allowed:
            log.warning("refused a connection from %s: its key is not listed", address.decode(errors="replace"))
        status = (b"200", b"OK") if allowed else (b"400", b"this key is not listed")
        self._socket.send_multipart([version, request, *status, b"", b""])


def _require_keys(router: "zmq.Socket[bytes]", where: Endpoint, options: ZmqOptions) -> ZapHandler:
    """Have the router accept only clients whose key is listed."""
    if not options.secret_key:
        raise OptionError(
            f"others can reach {where.text}, so it needs keys: make them with `blendhub keys`, then set the options "
            "secret_key and client_keys; or serve on ipc:// or a loopback address"
        )
    pair = read_secret("secret_key", options.secret_key)
    allowed = read_clients("client_keys", options.client_keys)
    router.setsockopt(zmq.CURVE_SERVER, True)
    router.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    return ZapHandler(router.context, allowed)


def _bind(router: "zmq.Socket[bytes]", where: Endpoint) -> str:
    try:
        router.bind(where.text)
    except zmq.ZMQError as error:
        raise InvalidInput(
            f"no server can listen at {where.text}: {error.strerror}; stop its server or choose another endpoint"
        ) from None
    return where.text if where.path is not None else router.getsockopt_string(zmq.LAST_ENDPOINT)
