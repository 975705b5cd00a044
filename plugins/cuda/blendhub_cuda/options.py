"""Options of the CUDA device, apart from the device, so that listing them imports nothing else."""

from typing import Annotated

import msgspec
from msgspec import Meta


class CudaOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    staging_mib: Annotated[
        float,
        Meta(
            gt=0,
            le=65536,
            description="device memory that stages KV in transit; a quarter must hold one layer of a chunk",
        ),
    ] = 64.0
    block_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="neighbours that are recomputed together when one of them is")
    ] = 32
