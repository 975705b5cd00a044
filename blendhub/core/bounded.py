"""Dicts that forget their first entry."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put_last(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Put an entry last, and forget the first one if there are more than ``most``."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
