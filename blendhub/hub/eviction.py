"""Eviction policies: which chunk to evict. They know keys, not bytes."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from blendhub.config import PolicyName

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """An order of eviction over a set of keys."""

    @abstractmethod
    def insert(self, key: K, content: int) -> None:
        """Add a key. ``content`` is a hash of its tokens, so that a policy recognises a key that was evicted before."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """The key was used."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget a key that was removed for another reason than eviction."""

    @abstractmethod
    def evict(self, pinned: Callable[[K], bool]) -> K | None:
        """Remove and return the key to evict, which is not pinned; None if all keys are."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: K) -> bool: ...


class LRU(EvictionPolicy[K]):
    """The least recently used key is evicted first."""

    def __init__(self) -> None:
        self._longest_unused_first: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K, content: int) -> None:
        self._longest_unused_first[key] = None

    def touch(self, key: K) -> None:
        self._longest_unused_first.move_to_end(key)

    def remove(self, key: K) -> None:
        del self._longest_unused_first[key]

    def evict(self, pinned: Callable[[K], bool]) -> K | None:
        for key in self._longest_unused_first:
            if not pinned(key):
                del self._longest_unused_first[key]
                return key
        return None

    def __len__(self) -> int:
        return len(self._longest_unused_first)

    def __contains__(self, key: K) -> bool:
        return key in self._longest_unused_first


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
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self.MOST_USES)

    def remove(self, key: K) -> None:
        del self._contents[key]
        if self._small.pop(key, None) is None:
            del self._main[key]

    def evict(self, pinned: Callable[[K], bool]) -> K | None:
        queues = [self._evict_small, self._evict_main]
        if len(self._small) < self.SMALL * len(self):
            queues.reverse()
        # The main queue again at the end: it may have received used keys from the small one by then.
        for evict in (*queues, self._evict_main):
            key = evict(pinned)
            if key is not None:
                return key
        return None

    def _evict_small(self, pinned: Callable[[K], bool]) -> K | None:
        for _ in range(len(self._small)):
            key, uses = self._small.popitem(last=False)
            if uses:
                self._main[key] = 0
            elif pinned(key):
                self._small[key] = 0
            else:
                self._remember(self._contents.pop(key))
                return key
        return None

    def _evict_main(self, pinned: Callable[[K], bool]) -> K | None:
        # In each round a key loses one use, so one that is not pinned is found within as many rounds.
        for _ in range((self.MOST_USES + 1) * len(self._main)):
            key, uses = self._main.popitem(last=False)
            if uses or pinned(key):
                self._main[key] = max(uses - 1, 0)
            else:
                del self._contents[key]
                return key
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
