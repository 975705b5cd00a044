"""Which chunk is evicted: S3-FIFO, with a share for KV that may not move."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from blendhub.hub.index.namespace_index import Chunk

K = TypeVar("K", bound=Hashable)
STAYING_SHARE = 0.25
"""A share of a full arena's chunks. KV that stays serves repetitions of one prompt; other KV serves any prompt."""


class S3FIFO(Generic[K]):
    """New keys enter a small queue; only keys that are used again there enter the main queue.

    A scan of keys used once passes through the small queue and leaves the main queue alone. Keys evicted from the
    small queue are remembered as ghosts: a key that is stored again soon enters the main queue directly.

    A key that is held is not evicted. It leaves the order meanwhile, so that held keys, however many, cost an eviction
    nothing.
    """

    SMALL = 0.1
    MAX_USES = 3

    def __init__(self) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._held: dict[K, tuple[OrderedDict[K, int], int]] = {}
        """The queue of each held key, and its uses."""
        self._contents: dict[K, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def insert(self, key: K, content: int) -> None:
        """Add a key. ``content`` is a hash of its tokens, by which a key is recognised that was evicted before."""
        if content in self._ghosts:
            del self._ghosts[content]
            self._main[key] = 0
        else:
            self._small[key] = 0
        self._contents[key] = content

    def touch(self, key: K) -> None:
        """Note that the key, held or not, was used."""
        if key in self._held:
            queue, uses = self._held[key]
            self._held[key] = queue, min(uses + 1, self.MAX_USES)
        else:
            queue = self._small if key in self._small else self._main
            queue[key] = min(queue[key] + 1, self.MAX_USES)

    def hold(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        self._held[key] = queue, queue.pop(key)

    def release(self, key: K) -> None:
        queue, uses = self._held.pop(key)
        queue[key] = uses

    def remove(self, key: K) -> None:
        """Forget a key, held or not, that was removed for another reason than eviction."""
        del self._contents[key]
        for keys in (self._small, self._main, self._held):
            keys.pop(key, None)

    def evict(self) -> K | None:
        """Remove and return the key to evict, which is not held; None if all keys are."""
        queues = [self._evict_small, self._evict_main]
        if len(self._small) < self.SMALL * len(self):
            queues.reverse()
        # The main queue again at the end: it may have received used keys from the small one by then.
        for evict in (*queues, self._evict_main):
            key = evict()
            if key is not None:
                return key
        return None

    def _evict_small(self) -> K | None:
        while self._small:
            key, uses = self._small.popitem(last=False)
            if not uses:
                self._ghosts[self._contents.pop(key)] = None
                while len(self._ghosts) > max(len(self._main), 1):
                    self._ghosts.popitem(last=False)
                return key
            self._main[key] = 0
        return None

    def _evict_main(self) -> K | None:
        # In each round a key loses one use, so one without uses is found within MAX_USES rounds.
        while self._main:
            key, uses = self._main.popitem(last=False)
            if not uses:
                del self._contents[key]
                return key
            self._main[key] = uses - 1
        return None

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: K) -> bool:
        return key in self._contents


class EvictionOrder:
    """The order in which a hub evicts: KV that may not move goes first while it takes more than its share.

    Each prompt that is blended, or that may not donate, is stored anew, so that in a single order a burst of such
    prompts would evict the text that all of them reuse.
    """

    def __init__(self) -> None:
        self._staying: S3FIFO[Chunk] = S3FIFO()
        self._others: S3FIFO[Chunk] = S3FIFO()

    def of(self, chunk: Chunk) -> S3FIFO[Chunk]:
        """The order that a chunk belongs to."""
        return self._others if chunk.run.provenance.is_movable else self._staying

    def evict(self) -> Chunk | None:
        orders = [self._others, self._staying]
        if len(self._staying) > STAYING_SHARE * len(self):
            orders.reverse()
        return next((chunk for order in orders if (chunk := order.evict()) is not None), None)

    def __len__(self) -> int:
        return len(self._staying) + len(self._others)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self.of(chunk)
