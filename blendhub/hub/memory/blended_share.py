"""The order of eviction in a hub: blended KV makes room before other KV does, once it takes more than its share."""

from blendhub.hub.config import PolicyName
from blendhub.hub.index.namespace_index import Chunk
from blendhub.hub.memory.eviction import POLICIES, EvictionPolicy

BLENDED_SHARE = 0.25
"""A share of a full arena's chunks. Blended KV serves repetitions of one whole prompt; other KV serves any prompt."""


class BlendedShare(EvictionPolicy[Chunk]):
    """Blended and other chunks, each in an order of the same policy.

    Each prompt that is blended is stored anew, so that in a single order a burst of such prompts would evict the text
    that all of them reuse.
    """

    def __init__(self, policy: PolicyName) -> None:
        self._blended: EvictionPolicy[Chunk] = POLICIES[policy]()
        self._others: EvictionPolicy[Chunk] = POLICIES[policy]()

    def insert(self, key: Chunk, content: int) -> None:
        self._order_of(key).insert(key, content)

    def touch(self, key: Chunk) -> None:
        self._order_of(key).touch(key)

    def hold(self, key: Chunk) -> None:
        self._order_of(key).hold(key)

    def release(self, key: Chunk) -> None:
        self._order_of(key).release(key)

    def remove(self, key: Chunk) -> None:
        self._order_of(key).remove(key)

    def evict(self) -> Chunk | None:
        orders = [self._others, self._blended]
        if len(self._blended) > BLENDED_SHARE * len(self):
            orders.reverse()
        return next((key for order in orders if (key := order.evict()) is not None), None)

    def __len__(self) -> int:
        return len(self._blended) + len(self._others)

    def __contains__(self, key: Chunk) -> bool:
        return key in self._order_of(key)

    def _order_of(self, key: Chunk) -> EvictionPolicy[Chunk]:
        return self._blended if key.run.origin.blended else self._others
