"""The options of each transport, in a module that does not import ZeroMQ."""

from typing import Annotated

import msgspec
from msgspec import Meta

MaxPending = Annotated[
    int,
    Meta(ge=1, le=2**20, description="requests under way in one server, and in one connection; one more gets Busy"),
]


class InprocOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_pending: MaxPending = 4096


class ZmqOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_pending: MaxPending = 4096
    max_frame_bytes: Annotated[
        int, Meta(ge=2**12, le=2**40, description="the largest message, and the largest buffer of a payload")
    ] = 256 * 2**20
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            le=2**16,
            description="connections to one server; beyond it, those without a request are closed, of the process or "
            "address that has most of them, the oldest first",
        ),
    ] = 4096
    heartbeat_s: Annotated[
        float, Meta(ge=0.05, le=3600, description="seconds between heartbeats; a peer silent for three counts as gone")
    ] = 2.0
    linger_s: Annotated[
        float, Meta(ge=0, le=60, description="seconds that a closing server waits for its last replies to be sent")
    ] = 0.2
    secret_key: Annotated[
        str, Meta(description="file with the secret key of this side, made by `blendhub keys`; used on tcp:// only")
    ] = ""
    server_key: Annotated[str, Meta(description="file with the public key of the server; clients need it")] = ""
    client_keys: Annotated[
        str, Meta(description="directory with the public keys of the clients that may connect; servers need it")
    ] = ""
