"""Where servers listen: what an endpoint means, and who can reach it."""

import ipaddress
import re

import msgspec

from blendhub.errors import InvalidInput

LONGEST_PATH = 107
"""What the kernel takes as the path of a Unix socket, in bytes."""

_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.%\w]+\]|[\w.*-]+):(?P<port>\d{1,5})")


class Endpoint(msgspec.Struct, frozen=True):
    """An endpoint that was understood: a Unix socket's ``path``, or the ``host`` of a TCP one."""

    text: str
    path: str | None = None
    host: str = ""

    @property
    def private(self) -> bool:
        """Whether nobody outside this machine can reach it, and on it only this user or loopback."""
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
    """Raises InvalidInput with what is wrong and how an endpoint looks."""
    if text.startswith("ipc://"):
        return Endpoint(text, path=_socket_path(text))
    tcp = _TCP.fullmatch(text)
    if not tcp or int(tcp["port"]) > 65535:
        raise InvalidInput(
            f"endpoint {text!r} is not understood; expected ipc:///PATH/OF/SOCKET or tcp://HOST:PORT (port 0: any)"
        )
    return Endpoint(text, host=tcp["host"])


def _socket_path(text: str) -> str:
    path = text.removeprefix("ipc://")
    if not path or path.startswith(("@", "*")) or "\0" in path:
        # Abstract names have no owner: whoever shares the network namespace could connect.
        raise InvalidInput(f"endpoint {text!r} names no file; expected ipc:///PATH/OF/SOCKET")
    length = len(path.encode())
    if length > LONGEST_PATH:
        raise InvalidInput(
            f"endpoint {text!r}: a socket's path may have {LONGEST_PATH} bytes, this has {length}; "
            "choose a directory nearer the root"
        )
    return path
