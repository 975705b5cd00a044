"""Options of the CPU device, apart from the device, so that listing them imports nothing else."""

from typing import Annotated

import msgspec
from msgspec import Meta


class CpuOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    threads: Annotated[
        int,
        Meta(ge=0, le=64, description="threads that copy; 0: as many as the process has cores, at most 4"),
    ] = 0
    block_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="neighbours that are recomputed together when one of them is")
    ] = 16
