"""Asks the kernel which user's process is at the other end of a connection on loopback."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
LOCAL, REMOTE, UID = 1, 2, 7
"""The columns of the tables."""


def is_own(connection: Any) -> bool:
    """Whether the peer of a TCP socket is a process of this machine and of the user that this process runs as."""
    table = TABLES.get(connection.family)
    if table is None:
        return False
    # The peer's end of the connection: its address is the remote one here.
    wanted = [_hex(connection.family, address) for address in (connection.getpeername(), connection.getsockname())]
    try:
        rows = table.read_text().splitlines()[1:]
    except OSError:
        return False
    return any(row[LOCAL : REMOTE + 1] == wanted and int(row[UID]) == os.geteuid() for row in map(str.split, rows))


def _hex(family: int, address: tuple[Any, ...]) -> str:
    """An address as the kernel's tables have it: words of the machine's own byte order, and the port."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
