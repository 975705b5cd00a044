"""The interface of a place for the bytes of chunks, which the catalogue knows by their keys."""

from typing import Protocol

Extent = tuple[int, int]
"""Bytes of the arena: where they begin, counted from the first slot, and how many they are."""


class ByteStore(Protocol):
    """Moves bytes between the arena and a place that other hubs reach. Called from several threads at once.

    A key is put once, and never used again for other bytes. Calls block, each for seconds at most: where the place
    does not answer they raise StoreFailed. When ``get`` has ended, in whatever way, nothing writes into its extents any
    more.
    """

    def put(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        """Keep bytes of the arena. False: there is no room for them."""
        ...

    def get(self, keys: list[str], extents: list[Extent]) -> list[bool]:
        """Fill the arena with bytes that were put. False: they are gone for certain."""
        ...

    def remove(self, keys: list[str]) -> None:
        """Forget bytes; fine where they are gone."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters by name."""
        ...

    def close(self) -> None: ...
