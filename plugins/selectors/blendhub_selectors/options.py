"""What can be set on each selector. Kept apart so that listing them imports nothing else."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

BlockTokens: TypeAlias = Annotated[
    int, Meta(ge=0, le=65536, description="neighbours that are picked together; 0: as many as the device likes")
]


class HkvdOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    signal: Annotated[Literal["k", "v", "kv"], Meta(description="what is compared: keys, values, or both added up")] = (
        "kv"
    )
    layer: Annotated[
        int, Meta(ge=1, description="where it is compared; the layers before it are computed for what is probed")
    ] = 1
    probe_share: Annotated[
        float, Meta(gt=0, le=1, description="how much of the moved text is probed; less is sooner done, and less sure")
    ] = 0.25
    block_tokens: BlockTokens = 0


class FirstKOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    k: Annotated[int, Meta(ge=1, le=2**31, description="tokens of each moved span, if it has as many")] = 16


class RandomOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seed: Annotated[int, Meta(ge=0, description="another seed picks other blocks")] = 0
    block_tokens: BlockTokens = 0
