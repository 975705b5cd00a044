"""The hashes under which vLLM caches a request's blocks.

Blended blocks are cached under salted hashes, which no request has by itself, so that no request finds blended KV
unasked. The *own* hashes of a request are those that follow from the tokens, the LoRA adapter and the cache salt of
everything up to a block's end.
"""

import secrets
from hashlib import blake2b
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.request import Request


class Settled(NamedTuple):
    """A prefix that ends with blended blocks."""

    hashes: list[BlockHash]
    first_approximate: int
    """The position of the first token whose KV is not what the model alone computes."""
    ratio: float
    """The least share of moved text that was recomputed in it."""


class RequestHashes:
    """The block hashes of one request: its own, and those under which vLLM caches its blocks."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._own = list(request.block_hashes)
        self._are_own = True
        self._cached_before: list[BlockHash] = []
        """The hashes of the blocks that were cached before the hashes were salted last."""
        self._unsalted = (list(self._own), True, self._cached_before)
        """The state before the hashes were salted last."""

    def own(self) -> list[BlockHash]:
        """The hashes that follow from the tokens, those of generated ones too."""
        request = self._request
        if self._are_own:
            self._own = list(request.block_hashes)
        else:
            salted, request.block_hashes = request.block_hashes, self._own
            request.update_block_hashes()
            request.block_hashes = salted
        return self._own

    def cached(self) -> list[BlockHash]:
        """The hashes under which vLLM has the request's blocks, or will have them."""
        return [*self._cached_before, *self._request.block_hashes[len(self._cached_before) :]]

    def take(self, settled: Settled | None) -> None:
        """Have vLLM look for this prefix; None: for the request's own blocks."""
        own = self.own()
        self._are_own = settled is None
        self._request.block_hashes = list(settled.hashes if settled else own)
        self._request.update_block_hashes()

    def salt(self, first_approximate: int, block_size: int, n_cached: int) -> None:
        """Make the hashes unique from a token on; vLLM has taken ``n_cached`` blocks from its cache."""
        self.own()
        self._unsalted = (list(self._request.block_hashes), self._are_own, self._cached_before)
        self._cached_before = self.cached()[:n_cached]
        salt_block_hashes(self._request, first_approximate, block_size)
        self._are_own = False

    def undo_salt(self) -> None:
        """Take back the last salt, before vLLM has used the hashes."""
        self._request.block_hashes, self._are_own, self._cached_before = self._unsalted

    def restore(self) -> None:
        """Use the own hashes again."""
        self._request.block_hashes = list(self.own())
        self._are_own, self._cached_before = True, []


def salt_block_hashes(request: Request, first_approximate: int, hash_block_size: int) -> None:
    """Make the block hashes unique to this request, from the first approximate token on.

    Block hashes are chained, so one salted hash makes all that follow unique, those of generated tokens too.
    The blocks before keep their hashes. Call this before vLLM caches the blocks.
    """
    if not request.block_hashes:  # the first block will have a hash that contains this
        request.cache_salt = secrets.token_hex(16)
        return
    # Only whole blocks have hashes. If the block has none yet, the one before is salted.
    link = min(first_approximate // hash_block_size, len(request.block_hashes) - 1)
    unsalted = request.block_hashes[link]
    salted = blake2b(bytes(unsalted) + secrets.token_bytes(16), digest_size=32).digest()
    del request.block_hashes[link:]
    request.block_hashes.append(type(unsalted)(salted))
    request.update_block_hashes()
