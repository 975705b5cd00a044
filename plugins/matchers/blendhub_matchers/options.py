"""The options of the matchers. Kept apart so that listing them needs neither numba nor an index."""

from typing import Annotated

import msgspec
from msgspec import Meta


class SeparatorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    separator: Annotated[
        Annotated[tuple[Annotated[int, Meta(ge=0, le=2**32 - 1)], ...], Meta(min_length=1)]
        | Annotated[str, Meta(min_length=1)],
        Meta(description="what stands between segments: token ids, or text, which an engine turns into ids"),
    ] = (0,)
    min_match_tokens: Annotated[int, Meta(ge=1, description="shorter segments are not worth a transfer")] = 16


class RollingHashOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_match_tokens: Annotated[int, Meta(ge=1, description="shorter stretches are not worth a transfer")] = 64
