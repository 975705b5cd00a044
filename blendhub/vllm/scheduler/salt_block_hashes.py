"""Salts a request's block hashes, so that no other request finds its blended KV in vLLM's prefix cache by itself."""

import secrets
from hashlib import blake2b

from vllm.v1.request import Request


def can_salt(request: Request) -> bool:
    """Whether the request has a block hash; a prompt shorter than a block has none."""
    return bool(request.block_hashes)


def salt_block_hashes(request: Request, first_approximate: int, hash_block_size: int) -> None:
    """Make the block hashes unique to this request, from the first approximate token on.

    Block hashes are chained, so one salted hash makes all that follow unique, those of generated tokens too.
    The blocks before keep their hashes. Call this before vLLM caches the blocks.
    """
    # Only whole blocks have hashes. If the block has none yet, the one before is salted.
    link = min(first_approximate // hash_block_size, len(request.block_hashes) - 1)
    known = request.block_hashes[link]
    changed = blake2b(bytes(known) + secrets.token_bytes(16), digest_size=32).digest()
    del request.block_hashes[link:]
    request.block_hashes.append(type(known)(changed))
    request.update_block_hashes()
