"""A limit of the whole hub that its holders share, without knowing how many they are."""

from collections import Counter
from collections.abc import Hashable


class Shares:
    """The shares of a limit. A holder may have as much as is left: alone half at most, so some is always left."""

    def __init__(self) -> None:
        self.total = 0
        self._held: Counter[Hashable] = Counter()

    def held_by(self, holder: Hashable) -> int:
        return self._held[holder]

    def have_room(self, holder: Hashable, more: int, most: int) -> bool:
        """Whether a holder may have more, where all holders together may have ``most``."""
        return self._held[holder] + more <= most - self.total - more

    def take(self, holder: Hashable, more: int) -> None:
        self.total += more
        self._held[holder] += more

    def give_back(self, holder: Hashable, less: int) -> None:
        self.total -= less
        self._held[holder] -= less
        if not self._held[holder]:
            del self._held[holder]
