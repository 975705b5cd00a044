"""The options of each store, in a separate module so that listing them imports nothing else."""

from typing import Annotated

import msgspec
from msgspec import Meta


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: Annotated[
        str,
        Meta(description="the directory, made if missing; empty: blendhub/disk in the user's cache directory"),
    ] = ""
    capacity_gib: Annotated[
        float,
        Meta(gt=0, le=2**33, description="the most that it stores, beside chunks being written"),
    ] = 32.0
    fsync: Annotated[
        bool,
        Meta(
            description="wait for each write: slower, but a power cut loses nothing; without it, it may lose the "
            "newest chunks"
        ),
    ] = False
