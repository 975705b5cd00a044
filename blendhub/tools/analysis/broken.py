"""Lines of a log that are no requests: all are counted, by their reasons, and the first ones are named."""

from collections import Counter

import msgspec

from blendhub.core.errors import InvalidInput

MOST_NAMED = 20
MOST_REASONS = 50


class BrokenLine(InvalidInput):
    """A line, or a request in it, cannot be played."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class BrokenLines:
    """Counts broken lines, however many there are, in bounded memory."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.named: list[tuple[Place, str]] = []
        """The first broken lines, whatever their reasons, and why each is broken."""

    def __len__(self) -> int:
        return self.reasons.total()

    def note(self, place: Place, reason: str) -> None:
        known = reason in self.reasons or len(self.reasons) < MOST_REASONS
        self.reasons[reason if known else "other reasons"] += 1
        if len(self.named) < MOST_NAMED:
            self.named.append((place, reason))
