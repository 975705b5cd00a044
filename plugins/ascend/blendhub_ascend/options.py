"""Options of the Ascend device, in a module of their own so that listing them imports nothing else."""

from typing import Annotated

import msgspec
from msgspec import Meta


class AscendOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    staging_mib: Annotated[
        float,
        Meta(
            gt=0,
            le=65536,
            description="NPU memory that stages KV in transit; a sixth must hold one layer of a chunk",
        ),
    ] = 96.0
    block_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="neighbours that are recomputed together when one of them is")
    ] = 32
    fast_ops: Annotated[
        bool,
        Meta(description="use torch_npu's own operators where a trial at the start proves them; false: torch alone"),
    ] = True
