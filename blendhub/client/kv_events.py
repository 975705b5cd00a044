"""What is stored and dropped, in the format of vLLM's KV cache events: ``vllm/distributed/kv_events.py``.

Routers that follow engines read it. The one field of ours is ``movable``, which others skip.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from blendhub.core.spans import Id
from blendhub.core.tokens import Tokens

MEDIUM = "CPU"
"""What vLLM calls memory of the host. Chunks that left the arena for a store stay announced as in it."""

BlockHash = Id
"""A name for a chunk; no two chunks of a hub share one."""
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class KVCacheEvent(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """The base of events."""


class BlockStored(KVCacheEvent, frozen=True):
    """A chunk is stored. It has no parent where its run begins."""

    block_hashes: Annotated[list[BlockHash], Meta(max_length=1)]
    parent_block_hash: BlockHash | None
    token_ids: Annotated[list[TokenId], Meta(max_length=2**16)]
    block_size: Annotated[int, Meta(ge=1, le=2**16)]
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str]] | None = None
    movable: bool = False
    """Whether the text is reused behind any other text, too, and not only behind its parent."""


class BlockRemoved(KVCacheEvent, frozen=True):
    """A chunk is gone."""

    block_hashes: Annotated[list[BlockHash], Meta(max_length=1)]
    medium: str


Event = BlockStored | BlockRemoved


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One message of a stream."""

    ts: float
    events: list[Event]
    data_parallel_rank: Any = None


def stored(
    hash: int, parent: int | None, tokens: Tokens, *, lora: str = "", cache_salt: str = "", movable: bool
) -> BlockStored:
    """The event of one chunk. It is found only with its adapter and its salt, as in vLLM."""
    keys = [key for key in (lora, cache_salt) if key]
    return BlockStored(
        [hash],
        parent,
        tokens.tolist(),
        len(tokens),
        None,
        MEDIUM,
        lora or None,
        [keys] if keys else None,
        movable,
    )
