"""Eviction policies: which chunk to evict. They know keys, not bytes."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from blendhub.hub.config import PolicyName

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An order of eviction over a set of keys.

    A key that is held is not evicted. It leaves the order meanwhile, so that held keys, however many, cost an eviction
    nothing.
    """

    @abstractmethod
    def insert(self, key: K, content: int) -> None:
        """Add a key. ``content`` is a hash of its tokens, so that a policy recognises a key that was evicted before."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """Note that the key, held or not, was used."""

    @abstractmethod
    def hold(self, key: K) -> None:
        """Keep the key from eviction until it is released."""

    @abstractmethod
    def release(self, key: K) -> None:
        """Let a held key be evicted again."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget a key, held or not, that was removed for another reason than eviction."""

    @abstractmethod
    def evict(self) -> K | None:
        """Remove and return the key to evict, which is not held; None if all keys are."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: K) -> bool: ...


class LRU(EvictionPolicy[K]):
    """The least recently used key is evicted first."""

    def __init__(self) -> None:
        self._longest_unused_first: OrderedDict[K, None] = OrderedDict()
        self._held: set[K] = set()

    def insert(self, key: K, content: int) -> None:
        self._longest_unused_first[key] = None

    def touch(self, key: K) -> None:
        if key not in self._held:
            self._longest_unused_first.move_to_end(key)

    def hold(self, key: K) -> None:
        del self._longest_unused_first[key]
        self._held.add(key)

    def release(self, key: K) -> None:
        self._held.remove(key)
        self._longest_unused_first[key] = None

    def remove(self, key: K) -> None:
        if key in self._held:
            self._held.remove(key)
        else:
            del self._longest_unused_first[key]

    def evict(self) -> K | None:
        return self._longest_unused_first.popitem(last=False)[0] if self._longest_unused_first else None

    def __len__(self) -> int:
        return len(self._longest_unused_first) + len(self._held)

    def __contains__(self, key: K) -> bool:
        return key in self._longest_unused_first or key in self._held


class S3FIFO(EvictionPolicy[K]):
    """New keys enter a small queue; only keys that are used again there enter the main queue.

    A scan of keys used once passes through the small queue and leaves the main queue alone. Keys evicted from the
    small queue are remembered as ghosts: a key that is stored again soon enters the main queue directly.
    """

    SMALL = 0.1
    MOST_USES = 3

    def __init__(self) -> None:
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._held: dict[K, tuple[OrderedDict[K, int], int]] = {}
        """The queue of each held key, and its uses."""
        self._contents: dict[K, int] = {}
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def insert(self, key: K, content: int) -> None:
        if content in self._ghosts:
            del self._ghosts[content]
            self._main[key] = 0
        else:
            self._small[key] = 0
        self._contents[key] = content

    def touch(self, key: K) -> None:
        if key in self._held:
            queue, uses = self._held[key]
            self._held[key] = queue, min(uses + 1, self.MOST_USES)
        else:
            queue = self._small if key in self._small else self._main
            queue[key] = min(queue[key] + 1, self.MOST_USES)

    def hold(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        self._held[key] = queue, queue.pop(key)

    def release(self, key: K) -> None:
        queue, uses = self._held.pop(key)
        queue[key] = uses

    def remove(self, key: K) -> None:
        del self._contents[key]
        for keys in (self._small, self._main, self._held):
            keys.pop(key, None)

    def evict(self) -> K | None:
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
                self._remember(self._contents.pop(key))
                return key
            self._main[key] = 0
        return None

    def _evict_main(self) -> K | None:
        # In each round a key loses one use, so one without uses is found within MOST_USES rounds.
        while self._main:
            key, uses = self._main.popitem(last=False)
            if not uses:
                del self._contents[key]
                return key
            self._main[key] = uses - 1
        return None

    def _remember(self, ghost: int) -> None:
        self._ghosts[ghost] = None
        while len(self._ghosts) > max(len(self._main), 1):
            self._ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: K) -> bool:
        return key in self._contents


POLICIES: dict[PolicyName, type[EvictionPolicy]] = {"lru": LRU, "s3fifo": S3FIFO}  # type: ignore[type-arg]
