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
        self._by_variant: dict[tuple[str, Variant], NamespaceIndex] = {}
        self._sums: dict[str, Counter[str]] = {}
        """The amounts stored, by base namespace, without what has changed since."""
        self._counted: dict[NamespaceIndex, Counter[str]] = {}
        """The part of ``_sums`` that belongs to each index."""
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
        return self._by_variant.get((base, variant))

    def make(self, namespace: Namespace) -> NamespaceIndex:
        """A new index, not added yet. Slow: matchers may compile. Changes no state, so any thread may call it."""
        return NamespaceIndex(namespace, self._host, self._threads, changed=self._note)

    def new_run_id(self) -> int:
        """An id that no other run has, of this hub or of one before it, whose matches an engine may still name.

        It has 53 bits, up to which numbers of JSON are exact.
        """
        return (next(self._run_numbers) % 2**24) << 29 | secrets.randbits(29)

    def add(self, index: NamespaceIndex) -> NamespaceIndex:
        """Add an index, unless its namespace has one; returns the index to be used."""
        present = self._by_digest.setdefault(index.digest, index)
        if present is index:
            self._by_variant[index.base, index.namespace.variant] = index
            self._note(index)
        return present

    def sums(self) -> dict[str, Counter[str]]:
        """The amounts stored, by the digest of an engine's namespace: each salt of a request makes a variant of it.

        Costs as much as has changed since the last call, whatever the number of namespaces.
        """
        for index in list(self._changed):
            stored = {"runs": len(index.runs), "chunks": index.n_chunks, "tokens": index.n_tokens}
            self._count(index, Counter(variants=1, matcher_bytes=index.nbytes, **stored))
            if index.queue.is_idle:
                del self._changed[index]
        return self._sums

    def drop_empty(self) -> None:
        """Drop the indexes in which nothing is stored or written. A later request makes a new index if necessary."""
        for index in list(self._maybe_empty):
            if index.runs:
                del self._maybe_empty[index]
            elif not index.growing:
                del self._maybe_empty[index], self._by_digest[index.digest]
                del self._by_variant[index.base, index.namespace.variant]
                self._count(index, Counter())
                self._changed.pop(index, None)

    def _note(self, index: NamespaceIndex) -> None:
        self._changed[index] = None
        if not index.runs:
            self._maybe_empty[index] = None

    def _count(self, index: NamespaceIndex, amounts: Counter[str]) -> None:
        sums = self._sums.setdefault(index.base, Counter())
        sums.subtract(self._counted.pop(index, Counter()))
        sums.update(amounts)
        if amounts:
            self._counted[index] = amounts
        elif not sums["variants"]:
            del self._sums[index.base]

    def check_integrity(self) -> None:
        """Assert that both ways to an index agree, and that the sums are right."""
        assert len(self._by_variant) == len(self), "an index is known by one of its two names only"
        for index in self:
            assert self.find(index.base, index.namespace.variant) is index
            assert index.digest == index.namespace.digest
            index.check_integrity()
            assert index.runs or index in self._maybe_empty
        sums = self.sums()
        assert self._counted.keys() == set(self), "an index that was dropped is counted"
        for base, amounts in sums.items():
            assert amounts["chunks"] == sum(index.n_chunks for index in self if index.base == base)
