"""The options of the selectors. Kept apart so that listing them imports nothing else."""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

BlockTokens: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        le=65536,
        description="neighbours picked together; 0: 16, or as many as are computed in the time of one",
    ),
]


class HkvdOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    signal: Annotated[Literal["k", "v", "kv"], Meta(description="what is compared: keys, values, or both added up")] = (
        "kv"
    )
    layer: Annotated[int, Meta(ge=1, description="the layer at which it is compared")] = 1
    probe_share: Annotated[
        float, Meta(gt=0, le=1, description="how much of the moved text is probed: less is faster and less sure")
    ] = 0.25
    block_tokens: BlockTokens = 0
    window_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="tokens picked together, one that deviates and what follows it; 0: blocks are picked instead",
        ),
    ] = 0


class FirstKOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    k: Annotated[
        int,
        Meta(
            ge=0,
            le=2**31,
            description="tokens of each moved span; 0: equally many of each, by the ratio",
        ),
    ] = 16


Depth: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]


class AttendedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: Annotated[
        tuple[Depth, ...],
        Meta(min_length=1, max_length=64, description="whose attention counts, as fractions of the model's depth"),
    ] = (0.57, 0.67, 0.77)
    attending_tokens: Annotated[
        int, Meta(ge=1, le=64, description="how many of the prompt's last tokens say what they attend to")
    ] = 32
    window_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="tokens picked together, a token and what follows it; 0: as many as are computed in the time "
            "of one",
        ),
    ] = 0
