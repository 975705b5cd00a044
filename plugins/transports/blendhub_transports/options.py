"""The options of the transports."""

from typing import Annotated

import msgspec
from msgspec import Meta


class TransportOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_pending: Annotated[
        int, Meta(ge=1, le=2**20, description="requests under way of one connection; one more gets Busy")
    ] = 1024
