"""The indexes of all namespaces that store something. Namespaces that are only looked up have none."""

import itertools
import secrets
from collections import Counter
from collections.abc import Iterator

from blendhub.core.layout import Namespace, Variant
from blendhub.framework.host import PluginHost
from blendhub.hub.index.match_queues import MatchThreads
from blendhub.hub.index.namespace_index import NamespaceIndex


class IndexTable:
    """Indexes by namespace, and by the base namespace of an engine and the variant of a request."""

    def __init__(self, host: PluginHost, threads: MatchThreads) -> None:
        self._host = host
        self._threads = threads
        self._run_numbers = itertools.count()
        self._by_digest: dict[str, NamespaceIndex] = {}
        self._by_base: dict[str, dict[Variant, NamespaceIndex]] = {}
        self._by_salt: dict[str, dict[NamespaceIndex, None]] = {}
        self._sums: dict[str, Counter[str]] = {}
        """The amounts stored, by base namespace, without what has changed since."""
        self._counted: dict[NamespaceIndex, Counter[str]] = {}
        """The part of ``_sums`` that belongs to each index."""
        self._costly: dict[str, dict[NamespaceIndex, None]] = {}
        """The indexes that take more memory than the KV that they index, by base namespace, in the order in
        which they began to."""
        self._changed: dict[NamespaceIndex, None] = {}
        self._maybe_empty: dict[NamespaceIndex, None] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[NamespaceIndex]:
        return iter(self._by_digest.values())

    def get(self, digest: str) -> NamespaceIndex | None:
        """The index of the namespace with this digest; None if nothing is stored there."""
        return self._by_digest.get(digest)

    def find(self, base: str, variant: Variant) -> NamespaceIndex | None:
        """The index of one variant of a base namespace; None if nothing is stored there."""
        variants = self._by_base.get(base)
        return variants.get(variant) if variants else None

    def make(self, namespace: Namespace) -> NamespaceIndex:
        """A new index, not added yet. Slow: matchers may compile. Changes no state, so any thread may call it."""
        return NamespaceIndex(namespace, self._host, self._threads, changed=self._note)

    def get_or_make(self, namespace: Namespace) -> NamespaceIndex:
        """The index of a namespace, made if it is new."""
        return self.get(namespace.digest) or self.add(self.make(namespace))

    def new_run_id(self) -> int:
        """An id that no other run has, of this hub or of one before it, whose matches an engine may still name.

        It has 53 bits, up to which numbers of JSON are exact.
        """
        return (next(self._run_numbers) % 2**24) << 29 | secrets.randbits(29)

    def of_base(self, base: str) -> list[NamespaceIndex]:
        """The indexes of all variants of a base namespace."""
        return list(self._by_base.get(base, {}).values())

    def of_salt(self, cache_salt: str) -> list[NamespaceIndex]:
        """The indexes of the requests with this salt, of whatever engine and LoRA adapter."""
        return list(self._by_salt.get(cache_salt, ()))

    def add(self, index: NamespaceIndex) -> NamespaceIndex:
        """Add an index, unless its namespace has one; returns the index to be used."""
        known = self._by_digest.setdefault(index.digest, index)
        if known is index:
            self._by_base.setdefault(index.base, {})[index.namespace.variant] = index
            self._by_salt.setdefault(index.namespace.variant.cache_salt, {})[index] = None
            self._note(index)
        return known

    def sums(self) -> dict[str, Counter[str]]:
        """The amounts stored, by the digest of an engine's namespace: each salt of a request makes a variant of it.

        Costs as much as has changed since the last call, whatever the number of namespaces.
        """
        for index in list(self._changed):
            matchers = index.nbytes
            kv = index.n_chunks * index.namespace.slot_bytes
            new = Counter(
                variants=1,
                runs=len(index.runs),
                chunks=index.n_chunks,
                tokens=len(index),
                matcher_bytes=matchers,
                excess=max(0, matchers - kv),
            )
            self._count(index, new)
            if index.queue.is_idle:
                del self._changed[index]
        return self._sums

    def excess(self) -> dict[str, int]:
        """Bytes that indexes take beyond the KV that they index, by base namespace; only where there are any."""
        return {base: sums["excess"] for base, sums in self.sums().items() if sums["excess"]}

    def oldest_costly(self, base: str) -> NamespaceIndex:
        """The first costly index of a base namespace: it takes more memory than the KV that it indexes."""
        return next(iter(self._costly[base]))

    def defer(self, index: NamespaceIndex) -> None:
        """Put the index behind the other costly indexes of its base namespace."""
        self._costly[index.base][index] = self._costly[index.base].pop(index)

    def drop_empty(self) -> None:
        """Drop the indexes in which nothing is stored or written. A later request makes a new index if necessary."""
        for index in list(self._maybe_empty):
            if index.runs:
                del self._maybe_empty[index]
            elif not index.growing:
                self.remove(index)

    def remove(self, index: NamespaceIndex) -> None:
        """Drop an index without runs."""
        self._maybe_empty.pop(index, None)
        del self._by_digest[index.digest]
        variants = self._by_base[index.base]
        del variants[index.namespace.variant]
        if not variants:
            del self._by_base[index.base]
        of_salt = self._by_salt[index.namespace.variant.cache_salt]
        del of_salt[index]
        if not of_salt:
            del self._by_salt[index.namespace.variant.cache_salt]
        self._count(index, Counter())
        self._changed.pop(index, None)

    def _note(self, index: NamespaceIndex) -> None:
        self._changed[index] = None
        if not index.runs:
            self._maybe_empty[index] = None

    def _count(self, index: NamespaceIndex, new: Counter[str]) -> None:
        sums = self._sums.setdefault(index.base, Counter())
        sums.subtract(self._counted.pop(index, Counter()))
        sums.update(new)
        costly = self._costly.setdefault(index.base, {})
        if new["excess"]:
            costly.setdefault(index)
        else:
            costly.pop(index, None)
        if new:
            self._counted[index] = new
        elif index.base not in self._by_base:
            del self._sums[index.base], self._costly[index.base]

    def check_integrity(self) -> None:
        """Assert that both ways to an index agree."""
        by_base = [index for variants in self._by_base.values() for index in variants.values()]
        assert len(by_base) == len(self), "an index is known by one of its two names only"
        assert all(self._by_base.values()), "a base namespace without indexes is kept"
        for index in self:
            assert self.find(index.base, index.namespace.variant) is index
            assert index.digest == index.namespace.digest
            index.check_integrity()
            assert index.runs or index in self._maybe_empty
        assert self._counted.keys() <= set(self._by_digest.values()), "an index that was dropped is counted"
        assert {index for costly in self._costly.values() for index in costly} <= self._counted.keys()
        assert {base: sums["chunks"] for base, sums in self.sums().items()} == {
            base: sum(index.n_chunks for index in variants.values()) for base, variants in self._by_base.items()
        }
