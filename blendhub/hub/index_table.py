"""The indexes of all namespaces that store something. Namespaces that are only looked up have none."""

from collections.abc import Collection, Iterator

from blendhub.hub.index import NamespaceIndex
from blendhub.layout import Variant


class IndexTable:
    """Indexes by namespace, and by the base namespace of an engine and the variant of a request."""

    def __init__(self) -> None:
        self._by_digest: dict[str, NamespaceIndex] = {}
        self._by_base: dict[str, dict[Variant, NamespaceIndex]] = {}

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

    def of_base(self, base: str) -> list[NamespaceIndex]:
        """The indexes of all variants of a base namespace."""
        return list(self._by_base.get(base, {}).values())

    def add(self, index: NamespaceIndex) -> NamespaceIndex:
        """Add an index, unless its namespace has one; returns the index to be used."""
        known = self._by_digest.setdefault(index.digest, index)
        if known is index:
            self._by_base.setdefault(index.base, {})[index.namespace.variant] = index
        return known

    def drop_empty(self, in_use: Collection[NamespaceIndex]) -> None:
        """Drop the indexes without runs, but for those ``in_use``. A later request makes a new one if need be."""
        for index in [index for index in self if not index.runs and index not in in_use]:
            del self._by_digest[index.digest]
            variants = self._by_base[index.base]
            del variants[index.namespace.variant]
            if not variants:
                del self._by_base[index.base]

    def check_integrity(self) -> None:
        """Assert that both ways to an index agree."""
        by_base = [index for variants in self._by_base.values() for index in variants.values()]
        assert len(by_base) == len(self), "an index is known by one of its two names only"
        assert all(self._by_base.values()), "a base namespace without indexes is kept"
        for index in self:
            assert self.find(index.base, index.namespace.variant) is index
            assert index.digest == index.namespace.digest
            index.check_integrity()
