"""vLLM's blocks of one request, and those that are held for it besides."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from blendhub.core.spans import Span

Tables = Sequence[Sequence[int]]
"""A request's blocks in each of the block tables that vLLM keeps for it. The null block stands for freed ones."""


class Loan(NamedTuple):
    """The blocks that are held for a request."""

    borrowed: list[KVCacheBlock]
    """Blocks that hold what this request loads and computes."""
    pinned: list[KVCacheBlock]
    """Blocks of vLLM's prefix cache that the request reads."""
    numbers: list[dict[int, int]]
    """For each block table, the blocks by their places in it."""


class ExactState(NamedTuple):
    """The blocks that are borrowed for the states of a request's repair, by the block tables of recurrent layers."""

    end: int
    """How many tokens these states stand behind once the request is loaded: those before the first moved text."""
    running: dict[int, KVCacheBlock]
    """The blocks of the states that go with the repair."""
    shown: dict[int, KVCacheBlock]
    """The blocks for the states behind ``shown_end`` tokens, which vLLM's prefix cache gets; none: it gets none."""
    shown_end: int


class RequestBlocks:
    def __init__(self) -> None:
        self.engine_tokens = 0
        """The length of vLLM's own cached prefix when the request was scheduled last."""
        self.are_allocated = False
        """Whether vLLM has allocated blocks; afterwards its hashes are only salted."""
        self.settled: Span | None = None
        """The span that the request took of blended blocks in vLLM's own cache."""
        self.asked: Loan | None = None
        """What is lent if vLLM allocates its own blocks in this step."""
        self.held: Loan | None = None
        self.held_until: float | None = None
        """Until when ``held`` may be held of a request that is loaded, or repaired; None while it is loading."""
        self.exact_state: ExactState | None = None
        """Set from the load of moved text until its repair ends, if there is one, in models with recurrent layers."""
        self.donors: list[KVCacheBlock] = []
        """Blocks of vLLM's prefix cache that the load reads; they are held until it has ended on all ranks."""
        self.n_denied = 0
        """How often vLLM has found no blocks beside those that were borrowed."""
        self.kept: Tables | None = None
        """The blocks of a request that has ended, which vLLM keeps."""
