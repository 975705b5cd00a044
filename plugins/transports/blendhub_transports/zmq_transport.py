"""The transport ``zmq``: ZeroMQ over a Unix socket, which only its user can reach."""

from blendhub.contracts.transport import Codec, Connection, Server, Service, Transport
from blendhub.core.errors import InvalidInput
from blendhub_transports.client import ZmqConnection
from blendhub_transports.options import TransportOptions
from blendhub_transports.server import ZmqServer

SCHEME = "ipc://"
LONGEST_PATH = 107
"""Bytes that the kernel allows for the path of a Unix socket."""


class ZmqTransport(Transport):
    schemes = (SCHEME,)

    def __init__(self, options: TransportOptions) -> None:
        self._max_pending = options.max_pending

    async def serve(self, endpoint: str, service: Service) -> Server:
        return ZmqServer(endpoint, _path(endpoint), service, self._max_pending)

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        return ZmqConnection(_path(endpoint), codec, self._max_pending)


def _path(endpoint: str) -> str:
    path = endpoint.removeprefix(SCHEME)
    if path in (endpoint, "") or path.startswith("@") or "\0" in path:
        # An abstract name has no owner: any process of the network namespace could connect.
        raise InvalidInput(f"endpoint {endpoint!r} is not understood; expected {SCHEME}/PATH/OF/SOCKET")
    length = len(path.encode())
    if length > LONGEST_PATH:
        raise InvalidInput(
            f"endpoint {endpoint!r}: a socket's path may have {LONGEST_PATH} bytes, this has {length}; choose a "
            "directory nearer the root"
        )
    return path
