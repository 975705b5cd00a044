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

MAX_LOOKS = 8
"""How often a request may wait for a later step, so that vLLM looks into its cache for what others have blended."""


class Settled(NamedTuple):
    """A prefix that ends with blended blocks."""

    hashes: list[BlockHash]
    first_approximate: int
    """The position of the first token whose KV is not what the model alone computes."""
    ratio: float
    """The least share of moved text that was recomputed in it."""


class Unsalted(NamedTuple):
    """The state of hashes before they were salted."""

    hashes: list[BlockHash]
    are_own: bool
    cached_before: list[BlockHash]


class RequestHashes:
    """The block hashes of one request: its own, and those under which vLLM caches its blocks."""

    def __init__(self, request: Request, block_size: int) -> None:
        """``block_size``: the tokens that each hash stands for."""
        self.settled: Settled | None = None
        """The blended prefix whose blocks vLLM looks for."""
        self.n_shown = 0
        """The number of tokens whose own hashes other connectors have seen, and may have kept."""
        self._request = request
        self._block_size = block_size
        self._own = list(request.block_hashes)
        self._are_own = True
        self._cached_before: list[BlockHash] = []
        """The hashes of the blocks that were cached before the hashes were salted last."""
        self._unsalted: Unsalted | None = None
        """What to go back to, if vLLM allocates no blocks for the request that has shown salted hashes."""
        self._n_looks = 0

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

    def look_for(self, settled: Settled | None) -> bool:
        """Have vLLM look for this prefix, or for the request's own blocks; returns whether it looked for others before.

        Only before vLLM has allocated blocks.
        """
        if settled == self.settled or self._n_looks >= MAX_LOOKS:
            return False
        own = self.own()
        self.settled, self._are_own, self._n_looks = settled, settled is None, self._n_looks + 1
        self._request.block_hashes = list(settled.hashes if settled else own)
        self._request.update_block_hashes()
        return True

    def show(self, first_approximate: int | None, engine_tokens: int) -> None:
        """Other connectors are asked for the request next, and may keep its hashes; from ``first_approximate`` on its
        KV will be approximate. Until vLLM has allocated blocks, the salt is taken back after each step."""
        self.n_shown = max(self.n_shown, self._request.num_tokens if first_approximate is None else first_approximate)
        if first_approximate is not None:
            self._unsalted = Unsalted(list(self._request.block_hashes), self._are_own, self._cached_before)
            self._salt(first_approximate, engine_tokens)

    def take_back(self) -> None:
        """vLLM has planned a step without allocating blocks: it will look for the hashes without a salt again."""
        if self._unsalted:
            self._request.block_hashes, self._are_own, self._cached_before = self._unsalted
            self._unsalted = None

    def salt(self, first_approximate: int, engine_tokens: int) -> None:
        """Make the hashes unique from a token on: vLLM has allocated blocks, and had ``engine_tokens`` in its cache."""
        if self._unsalted:
            self._unsalted = None  # they are salted already
        else:
            self._salt(first_approximate, engine_tokens)

    def restore(self) -> None:
        """All KV is exact: use the own hashes again."""
        self._request.block_hashes = list(self.own())
        self._are_own, self._cached_before = True, []
        self.n_shown = max(self.n_shown, self._request.num_tokens)

    def _salt(self, first_approximate: int, engine_tokens: int) -> None:
        self.own()
        # With one group of blocks, vLLM hashes whole blocks, whatever ``hash_block_size`` says.
        self._cached_before = self.cached()[: engine_tokens // self._block_size]
        salt_block_hashes(self._request, first_approximate, self._block_size)
        self._are_own = False


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
