"""Keeps blended KV out of vLLM's prefix cache."""

import secrets
from hashlib import blake2b

from vllm.v1.request import Request


def can_salt(request: Request) -> bool:
    """Whether there is a block hash to begin with; a prompt shorter than a block has none."""
    return bool(request.block_hashes)


def salt_block_hashes(request: Request, first_approximate: int, hash_block_size: int) -> None:
    """Let no other request find this one's blocks from the first approximate token on.

    Block hashes are chained, so one changed link makes all that follow unique to this request, generated tokens too.
    The blocks before keep their hashes. To be called before the blocks are put into the cache.
    """
    # Hashes are made of whole blocks: where none is there yet to be changed, the one before has to be.
    link = min(first_approximate // hash_block_size, len(request.block_hashes) - 1)
    known = request.block_hashes[link]
    changed = blake2b(bytes(known) + secrets.token_bytes(16), digest_size=32).digest()
    del request.block_hashes[link:]
    request.block_hashes.append(type(known)(changed))
    request.update_block_hashes()
