"""Places of documents: numbers, or names. Imports nothing: presets are listed where little is installed."""

from collections.abc import Sequence
from typing import TypeAlias

Place: TypeAlias = int | str
"""A number from 0 on, or one of these names."""
NAMES = ("first", "middle", "last")


def numbers_of(places: Sequence[Place], documents: int, what: str) -> list[int]:
    """Where these places are among so many documents; raises ValueError, which says ``what`` they are, if there is no
    such place, or one twice.
    """
    named: dict[Place, Place] = {"first": 0, "middle": documents // 2, "last": documents - 1}
    numbers = [named.get(place, place) for place in places]
    for place, number in zip(places, numbers, strict=True):
        if not (isinstance(number, int) and 0 <= number < documents):
            raise ValueError(
                f"{what}: {place} is out of range; there are {documents} documents, so 0 to {documents - 1}, or "
                f"{', '.join(NAMES)}, are possible"
            )
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{what}: {' '.join(map(str, places))} name one of {documents} documents twice")
    return [int(number) for number in numbers]
