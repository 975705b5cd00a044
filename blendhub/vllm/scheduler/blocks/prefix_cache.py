"""vLLM's blocks: which ones a request has, what the prefix cache holds, and blended blocks for later requests.

Blended blocks are cached under salted hashes, which no request has by itself, so that no request finds blended KV
unasked. The salted hashes are remembered by the *own* ones: those that follow from the tokens, the LoRA adapter and
the cache salt of everything up to a block's end. A request with the same own hashes may take the salted ones.
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from blendhub.vllm.scheduler.request_state import RequestState

Tables = Sequence[Sequence[int]]
"""A request's blocks in each of the block tables that vLLM keeps for it. The null block stands for freed ones."""


class RequestBlocks:
    """The blocks as vLLM's manager knows them. Asked by the scheduler's thread."""

    manager: "KVCacheManager"
    """vLLM gives it before the first request."""

    def of(self, request: str) -> Tables:
        """The blocks of a running request in each block table, in the order of its tokens."""
        return self.manager.get_block_ids(request)

    @property
    def pool(self) -> "BlockPool":
        return self.manager.block_pool

    @property
    def hash_block_size(self) -> int:
        """The number of tokens that each block hash stands for."""
        return self.manager.block_pool.hash_block_size

    def cached_blocks(self, hashes: Sequence[BlockHash], most: int) -> Sequence[Sequence[KVCacheBlock]]:
        """The blocks that vLLM's prefix cache has under these hashes, for each block table."""
        return self.manager.coordinator.find_longest_cache_hit(list(hashes), most)[0]

    def cached_tokens(self, hashes: Sequence[BlockHash], most: int) -> int:
        """How many tokens, up to ``most``, vLLM's prefix cache has under these hashes."""
        return self.manager.coordinator.find_longest_cache_hit(list(hashes), most)[1]


MOST_BLOCKS = 2**16
"""Blended blocks whose hashes are remembered: about 25 MB. With one more, the one used longest ago is forgotten."""


class _Block(NamedTuple):
    """A blended block."""

    hash: BlockHash
    before: BlockHash | None
    """The hash of the block before, if there is one."""
    first_approximate: int
    ratio: float


class Settled(NamedTuple):
    """A prefix that ends with blended blocks."""

    hashes: list[BlockHash]
    first_approximate: int
    """The position of the first token whose KV is not what the model alone computes."""
    ratio: float
    """The least share of moved text that was recomputed in it."""


class SettledBlocks:
    """The blended blocks that vLLM was given, of all requests. For one thread."""

    def __init__(self, engine: RequestBlocks, most: int = MOST_BLOCKS) -> None:
        self._engine = engine
        self._most = most
        self._blocks: dict[BlockHash, _Block] = {}
        """The blended blocks by their own hashes; the block used longest ago comes first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, state: "RequestState", least_ratio: float | None) -> bool:
        """Have vLLM look for the blended blocks that a request may take; returns whether that is new.

        ``least_ratio``: the share that must have been recomputed in them; None: it takes none.
        """
        settled, request = None, state.request
        if least_ratio is not None and not request.skip_reading_prefix_cache:
            settled = self.find(state.hashes.own(), request.num_tokens, least_ratio)
        return state.take(settled)

    def remember(self, state: "RequestState") -> None:
        """Remember the blended blocks that vLLM has of a request, or will have, or what was generated behind them."""
        if state.first_approximate is not None:
            self.add(state.hashes.own(), state.hashes.cached(), state.first_approximate, state.ratio)

    def add(
        self,
        own: Sequence[BlockHash],
        hashes: Sequence[BlockHash],
        first_approximate: int,
        ratio: float,
    ) -> None:
        """Note that vLLM has blocks, or will have them, under these hashes in place of the own ones."""
        for at, (mine, salted) in enumerate(zip(own, hashes, strict=True)):
            if mine == salted:
                continue
            block = _Block(salted, hashes[at - 1] if at else None, first_approximate, ratio)
            known = self._blocks.pop(mine, None)
            self._blocks[mine] = known if known and known[:2] == block[:2] else block
        while len(self._blocks) > self._most:
            del self._blocks[next(iter(self._blocks))]

    def find(self, own: Sequence[BlockHash], n_tokens: int, least_ratio: float) -> Settled | None:
        """The blended prefix of which vLLM has the most tokens cached; None if vLLM has as many under the own hashes.

        ``least_ratio``: blocks that were blended with a smaller share of recomputed tokens are left out.
        """
        candidates = self._candidates(own, least_ratio)
        if not candidates:
            return None
        # The last token is always computed.
        lengths = [self._engine.cached_tokens(candidate.hashes, n_tokens - 1) for candidate in candidates]
        best, longest = None, self._engine.cached_tokens(own, n_tokens - 1)
        for candidate, length in zip(candidates, lengths, strict=True):
            if length > longest:
                best, longest = candidate, length
        return best

    def clear(self) -> None:
        self._blocks.clear()

    def _candidates(self, own: Sequence[BlockHash], least_ratio: float) -> list[Settled]:
        """The prefixes of these blocks that end with blended blocks; each next prefix branches off at a later block."""
        found: list[Settled] = []
        for at, mine in enumerate(own):
            block = self._blocks.get(mine)
            if block is None or block.ratio < least_ratio:
                continue
            if found and len(found[-1].hashes) == at and block.before == found[-1].hashes[-1]:
                found[-1].hashes.append(block.hash)
                found[-1] = found[-1]._replace(ratio=min(found[-1].ratio, block.ratio))
            elif block.before == (own[at - 1] if at else None):
                found.append(Settled([*own[:at], block.hash], block.first_approximate, block.ratio))
        return found


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


class ShownHashes:
    """Keeps blended blocks from being stored under hashes that a connector has seen before the blend was decided.

    vLLM asks BlendHub for a request first, and then the other connectors, which look at its hashes and may keep them.
    So hashes are salted with the decision to blend, and not only when vLLM has allocated blocks; and no request blends
    what was shown under its own hashes. For the scheduler's thread.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._salted: dict[str, RequestState] = {}
        """The requests whose hashes were salted in this step, and for which vLLM has not allocated blocks yet."""

    def permit(self, state: "RequestState", first_approximate: int | None) -> bool:
        """Whether a request may take KV that is approximate from a position on."""
        return first_approximate is None or first_approximate >= state.shown_exact

    def show(self, state: "RequestState", first_approximate: int | None) -> None:
        """The other connectors are asked next; from this position on, the request's KV will be approximate."""
        n_exact = state.request.num_tokens if first_approximate is None else first_approximate
        state.shown_exact = max(state.shown_exact, n_exact)
        if first_approximate is not None:
            state.salt(first_approximate, self._block_size)
            self._salted[state.id] = state

    def is_salted(self, state: "RequestState") -> bool:
        """Whether the hashes are salted already; asked once vLLM has allocated blocks."""
        return self._salted.pop(state.id, None) is not None

    def end_step(self) -> None:
        """vLLM has planned a step: requests without blocks get their own hashes back, for vLLM's next look."""
        for state in self._salted.values():
            state.hashes.undo_salt()
        self._salted.clear()


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
    known = request.block_hashes[link]
    changed = blake2b(bytes(known) + secrets.token_bytes(16), digest_size=32).digest()
    del request.block_hashes[link:]
    request.block_hashes.append(type(known)(changed))
    request.update_block_hashes()
