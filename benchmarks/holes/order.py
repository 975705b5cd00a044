"""Which documents are the holes of a prompt, and where they stand: pure."""

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.quality.workload import Case, Question, Tokens


class Prompt(NamedTuple):
    """One query, its documents in the order in which the prompt has them."""

    header: Tokens
    documents: list[Tokens]
    holes: set[int]
    """The numbers of those that nothing computes before the query."""
    question: Question

    @property
    def tokens(self) -> Tokens:
        return [*self.header, *(token for document in self.documents for token in document), *self.question.tokens]

    @property
    def known(self) -> list[Tokens]:
        return [document for number, document in enumerate(self.documents) if number not in self.holes]


def with_holes(case: Case, others: Sequence[Tokens], ids: Sequence[int], positions: Sequence[int]) -> Prompt:
    """The case's documents and ``others`` behind them, of which those with these numbers are holes.

    The n-th hole stands at the n-th position of the prompt's documents; -1 is the middle.
    """
    documents = [*case.documents, *others]
    check(len(documents), ids, positions)
    places = {len(documents) // 2 if place < 0 else place: hole for place, hole in zip(positions, ids, strict=True)}
    if len(places) < len(ids):
        raise ValueError(f"hole positions {list(positions)} name one place twice, of {len(documents)} documents")
    rest = iter([number for number in range(len(documents)) if number not in ids])
    order = [places[place] if place in places else next(rest) for place in range(len(documents))]
    return Prompt(case.header, [documents[number] for number in order], set(places), case.questions[0])


def check(documents: int, ids: Sequence[int], positions: Sequence[int]) -> None:
    """Raises ValueError unless each hole has a position, and the prompt has them all."""
    if len(ids) != len(positions):
        raise ValueError(f"{len(ids)} hole ids and {len(positions)} hole positions; give one position for each hole")
    if len(set(ids)) < len(ids):
        raise ValueError(f"hole ids {list(ids)} name one document twice")
    for name, given, least in (("id", ids, 0), ("position", positions, -1)):
        for number in given:
            if not least <= number < documents:
                raise ValueError(
                    f"hole {name} {number} is out of range: a prompt has {documents} documents, so {least} to "
                    f"{documents - 1} are possible"
                )


def inflated(cases: Sequence[Case], number: int, at: int) -> list[Tokens]:
    """So many documents of the queries that follow this one, one of each in turn."""
    others: list[Tokens] = []
    for step in range(number):
        # Round after round through the other queries, each time with the next of its documents.
        turn, which = divmod(step, max(1, len(cases) - 1))
        other = cases[(at + 1 + which) % len(cases)]
        if len(cases) == 1 or turn >= len(other.documents):
            raise ValueError(f"{number} documents of other queries were asked for, but query {at} finds {len(others)}")
        others.append(other.documents[turn])
    return others
