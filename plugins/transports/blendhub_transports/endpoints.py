"""Parses endpoints, and says which of them only this machine or this user can reach."""

import ipaddress
import re

import msgspec

from blendhub.core.errors import InvalidInput

LONGEST_PATH = 107
"""Bytes that the kernel allows for the path of a Unix socket."""

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%\w]+\]|[\w.*-]+):(?P<port>\d{1,5})")


class Endpoint(msgspec.Struct, frozen=True):
    """A parsed endpoint: the ``path`` of a Unix socket, or the ``host`` and ``port`` of a TCP endpoint."""

    text: str
    path: str | None = None
    host: str = ""
    port: int = 0

    @property
    def private(self) -> bool:
        """Whether it is a Unix socket, which belongs to its user, or a loopback address."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:  # a name, or every interface
            return False

    @property
    def ipv6(self) -> bool:
        return self.host.startswith("[")


def parse_endpoint(text: str) -> Endpoint:
    """The parts of an endpoint; raises InvalidInput with what is wrong and how an endpoint looks."""
    if text.startswith("ipc://"):
        return Endpoint(text, path=_socket_path(text))
    tcp = _TCP.fullmatch(text)
    if not tcp or int(tcp["port"]) > 65535:
        raise InvalidInput(
            f"endpoint {text!r} is not understood; expected ipc:///PATH/OF/SOCKET or tcp://HOST:PORT (port 0: any)"
        )
    return Endpoint(text, host=tcp["host"], port=int(tcp["port"]))


def _socket_path(text: str) -> str:
    path = text.removeprefix("ipc://")
    if not path or path.startswith(("@", "*")) or "\0" in path:
        # An abstract name has no owner: any process of the network namespace could connect.
        raise InvalidInput(f"endpoint {text!r} does not name a file; expected ipc:///PATH/OF/SOCKET")
    length = len(path.encode())
    if length > LONGEST_PATH:
        raise InvalidInput(
            f"endpoint {text!r}: a socket's path may have {LONGEST_PATH} bytes, this has {length}; "
            "choose a directory nearer the root"
        )
    return path
