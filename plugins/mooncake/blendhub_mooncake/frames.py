"""The messages between a hub and its Mooncake process: packets of msgpack over a pair of Unix sockets."""

import socket
import time
from typing import Literal, TypeVar

import msgspec
from blendhub_fleet.bytes import Extent

from blendhub.contracts import ArenaFile

Message = TypeVar("Message")
MAX_BYTES = 2**18
"""More than Linux lets a packet be; a call has some ten thousand bytes."""


class ChildSetup(msgspec.Struct, frozen=True):
    """The first message: how the process reaches Mooncake, and which arena it copies from and into."""

    arena: ArenaFile
    master: str
    """The address of ``mooncake_master``, or ``etcd://...`` where it is highly available."""
    address: str = ""
    """This machine's address, as Mooncake's nodes see it; empty: the address from which packets reach the master."""
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""


class Started(msgspec.Struct, frozen=True):
    """The answer to it. An error, if there is one, says why the process cannot work."""

    error: str = ""


class Call(msgspec.Struct, frozen=True, array_like=True):
    what: Literal["put", "get", "remove"]
    keys: list[str]
    extents: list[Extent]
    """Where the bytes of each key lie in the arena: offset and length. Empty where keys are removed."""


class Codes(msgspec.Struct, frozen=True, array_like=True):
    """Mooncake's own result for each key of a call."""

    codes: list[int]


def send(line: socket.socket, message: msgspec.Struct, deadline: float | None = None) -> None:
    """Raises OSError, of which TimeoutError is one, if the message was not taken by the deadline."""
    line.settimeout(_left(deadline))
    line.send(msgspec.msgpack.encode(message))


def receive(line: socket.socket, kind: type[Message], deadline: float | None = None) -> Message:
    """Raises OSError if no message came by the deadline, and MsgspecError if it is not one of this kind.

    What has arrived already is received even behind the deadline: this process may have been stopped meanwhile.
    """
    line.settimeout(_left(deadline))
    try:
        data = line.recv(MAX_BYTES)
    except BlockingIOError:  # what a socket with a timeout of 0 raises
        raise TimeoutError("no answer by the deadline") from None
    if not data:
        raise ConnectionResetError("the other end was closed")
    return msgspec.msgpack.decode(data, type=kind)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
