"""Asks the kernel which user's process is at the other end of a connection on loopback."""

import os
import socket
import sys
from pathlib import Path

LOCAL, REMOTE, UID = 1, 2, 7
"""The columns of the kernel's tables."""


def is_own(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Whether the client of a connection to this server is a process of this machine, and of this process's user."""
    family, table = (socket.AF_INET6, "tcp6") if ":" in server[0] else (socket.AF_INET, "tcp")
    # The client's end of the connection: its own address is the local one there.
    addresses = [_hex(family, *client), _hex(family, *server)]
    try:
        rows = Path("/proc/net", table).read_text().splitlines()[1:]
    except OSError:
        return False
    return any(row[LOCAL : REMOTE + 1] == addresses and int(row[UID]) == os.geteuid() for row in map(str.split, rows))


def _hex(family: int, host: str, port: int) -> str:
    """An address as the kernel's tables have it: words of the machine's own byte order, and the port."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
