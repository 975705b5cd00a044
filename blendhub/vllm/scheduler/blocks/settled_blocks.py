"""The blended blocks of vLLM's prefix cache, which later requests may take.

The salted hashes of blended blocks are remembered by the own ones (see ``hashes``). A request with the same own hashes
may take the salted ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import BlockHash

from blendhub.vllm.scheduler.blocks.engine_blocks import EngineBlocks
from blendhub.vllm.scheduler.request.hashes import Settled
from blendhub.vllm.scheduler.request.served_request import ServedRequest

MAX_BLOCKS = 2**16
"""Blended blocks whose hashes are remembered: about 25 MB. With one more, the one used longest ago is forgotten."""


class _Block(NamedTuple):
    """A blended block."""

    hash: BlockHash
    before: BlockHash | None
    """The hash of the block before, if there is one."""
    first_approximate: int
    ratio: float


class SettledBlocks:
    """The blended blocks that vLLM was given, of all requests. For one thread."""

    def __init__(self, engine: EngineBlocks, most: int = MAX_BLOCKS) -> None:
        self._engine = engine
        self._most = most
        self._blocks: dict[BlockHash, _Block] = {}
        """The blended blocks by their own hashes; the block used longest ago comes first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def look_for(self, request: ServedRequest) -> bool:
        """Have vLLM look for the blended blocks that a request may take; returns whether that is new."""
        settled, least_ratio = None, request.terms.settled_ratio
        if least_ratio is not None and not request.request.skip_reading_prefix_cache:
            settled = self.find(request.hashes.own(), request.request.num_tokens, least_ratio)
        return request.hashes.look_for(settled)

    def remember(self, request: ServedRequest) -> None:
        """Remember the blended blocks that vLLM has of a request, or will have, or what was generated behind them."""
        if request.first_approximate is not None:
            self.add(request.hashes.own(), request.hashes.cached(), request.first_approximate, request.kv.ratio)

    def add(
        self,
        own: Sequence[BlockHash],
        hashes: Sequence[BlockHash],
        first_approximate: int,
        ratio: float,
    ) -> None:
        """Note that vLLM has blocks, or will have them, under these hashes in place of the own ones."""
        for at, (unsalted, salted) in enumerate(zip(own, hashes, strict=True)):
            if unsalted == salted:
                continue
            block = _Block(salted, hashes[at - 1] if at else None, first_approximate, ratio)
            earlier = self._blocks.pop(unsalted, None)
            self._blocks[unsalted] = earlier if earlier and earlier[:2] == block[:2] else block
        while len(self._blocks) > self._most:
            del self._blocks[next(iter(self._blocks))]

    def find(self, own: Sequence[BlockHash], n_tokens: int, least_ratio: float) -> Settled | None:
        """The blended prefix of which vLLM has the most tokens cached; None if vLLM has as many under the own hashes.

        ``least_ratio``: blocks that were blended with a smaller share of recomputed tokens are left out.
        """
        if not (prefixes := self._blended_prefixes(own, least_ratio)):
            return None
        # The last token is always computed.
        lengths = [self._engine.cached_tokens(prefix.hashes, n_tokens - 1) for prefix in prefixes]
        longest = max(lengths)
        return prefixes[lengths.index(longest)] if longest > self._engine.cached_tokens(own, n_tokens - 1) else None

    def clear(self) -> None:
        self._blocks.clear()

    def _blended_prefixes(self, own: Sequence[BlockHash], least_ratio: float) -> list[Settled]:
        """The prefixes of these blocks that end with blended blocks; each next prefix branches off at a later block."""
        prefixes: list[Settled] = []
        for at, unsalted in enumerate(own):
            block = self._blocks.get(unsalted)
            if block is None or block.ratio < least_ratio:
                continue
            if prefixes and len(prefixes[-1].hashes) == at and block.before == prefixes[-1].hashes[-1]:
                prefixes[-1].hashes.append(block.hash)
                prefixes[-1] = prefixes[-1]._replace(ratio=min(prefixes[-1].ratio, block.ratio))
            elif block.before == (own[at - 1] if at else None):
                prefixes.append(Settled([*own[:at], block.hash], block.first_approximate, block.ratio))
        return prefixes
