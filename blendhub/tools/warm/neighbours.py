"""Which document stands before which: the one that a file names, or an earlier one that shares most rare words."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from blendhub.core.errors import InvalidInput
from blendhub.tools.warm.documents import Document

WORD = re.compile(r"\w+")
COMMON = 64
"""Words of more documents than this are not rare: they say little, and their lists would take long."""
MOST_WORDS = 64
"""The rarest words of a document by which it is known."""


def neighbours(documents: Sequence[Document]) -> list[int | None]:
    """For each document the number of another one; None for the only document.

    Documents that are added to the end of a file change none of these. Raises InvalidInput if a document names one
    that is not there.
    """
    by_name = {one.name: number for number, one in enumerate(documents) if one.name}
    found: list[int | None] = []
    for number, (one, similar) in enumerate(zip(documents, _similar(documents), strict=True)):
        if one.neighbour and one.neighbour not in by_name:
            raise InvalidInput(f"{one.place}: its neighbour {one.neighbour!r} is no document's id")
        named = by_name.get(one.neighbour) if one.neighbour else None
        found.append(similar if named is None or named == number else named)
    return found


def _similar(documents: Sequence[Document]) -> Iterator[int | None]:
    """For each document the earlier one with the most shared rare words, where a rarer word counts more.

    Among equals the latest one counts; for a document that shares no rare word, that is the one before it. The first
    document gets the second.
    """
    n_documents: Counter[str] = Counter()
    owners: dict[str, list[int]] = {}
    for number, one in enumerate(documents):
        words = set(WORD.findall(one.text.lower()))
        n_documents.update(words)
        rare = sorted((n_documents[word], word) for word in words if n_documents[word] <= COMMON)[:MOST_WORDS]
        shared: Counter[int] = Counter()
        for n, word in rare:
            for owner in owners.setdefault(word, []):
                shared[owner] += 1 / n  # type: ignore[assignment]
            owners[word].append(number)
        if number:
            yield max(shared, key=lambda other: (shared[other], other), default=number - 1)
        else:
            yield 1 if len(documents) > 1 else None


def paths(parents: Sequence[int | None], fits: Callable[[Sequence[int], int], bool]) -> list[list[int]]:
    """What stands before each one: what stands before its parent, and the parent; the parent alone if more does not
    fit, or if the parent stands behind this one.

    So what stands before one is also the prompt in which its parent was computed.
    """
    found: dict[int, list[int]] = {}
    for number in range(len(parents)):
        line: list[int] = []
        at: int | None = number
        while at is not None and at not in found and at not in line:
            line.append(at)
            at = parents[at]
        for one in reversed(line):
            parent = parents[one]
            if parent is None:
                found[one] = []
            else:
                longer = [*found[parent], parent] if parent in found else [parent]
                found[one] = longer if one not in longer and fits(longer, one) else [parent]
    return [found[number] for number in range(len(parents))]
