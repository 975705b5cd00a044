"""The transport ``zmq``: ROUTER and DEALER over Unix sockets or TCP."""

from pathlib import Path

from blendhub.contracts.transport import Codec, Connection, KeyFiles, Server, Service, Transport
from blendhub_transports.client import ZmqConnection
from blendhub_transports.dealer import read_keys
from blendhub_transports.endpoints import parse_endpoint
from blendhub_transports.keys import client_options_beside, make_keys
from blendhub_transports.listener import Listener
from blendhub_transports.options import ZmqOptions
from blendhub_transports.server import ZmqServer


class ZmqTransport(Transport):
    """One set of options serves both sides; each uses the keys that it needs."""

    schemes = ("ipc://", "tcp://")

    def __init__(self, options: ZmqOptions) -> None:
        self._options = options

    async def serve(self, endpoint: str, service: Service) -> Server:
        where = parse_endpoint(endpoint)
        return ZmqServer(Listener(where, self._options), service, self._options, shares_clock=where.private)

    def connect(self, endpoint: str, codec: Codec) -> Connection:
        where = parse_endpoint(endpoint)
        return ZmqConnection(where, read_keys(where, self._options), codec, self._options)

    def make_keys(self, directory: Path) -> KeyFiles:
        return make_keys(directory)

    def client_options(self, endpoint: str) -> dict[str, str]:
        has_keys = parse_endpoint(endpoint).path is None and self._options.secret_key
        return client_options_beside(Path(self._options.secret_key).absolute().parent) if has_keys else {}
