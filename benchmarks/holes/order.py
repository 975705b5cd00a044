"""Which documents are the holes of a prompt, where they stand, and what is computed before: pure."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from benchmarks.quality.workload import Case, Question, Tokens

Place = int | str
"""A number from 0 on, or one of these names."""
NAMES = ("first", "middle", "last")


class Prompt(NamedTuple):
    """One query, its documents in the order in which the prompt has them."""

    header: Tokens
    documents: list[Tokens]
    holes: set[int]
    """The numbers of those that nothing computes before the query."""
    question: Question
    separator: Tokens
    """Stands behind the header, and behind each document."""

    @property
    def tokens(self) -> Tokens:
        parts = (part for document in self.documents for part in (*document, *self.separator))
        return [*self.head, *parts, *self.question.tokens]

    @property
    def head(self) -> Tokens:
        return [*self.header, *self.separator]

    @property
    def missing(self) -> set[tuple[int, ...]]:
        """The texts of the holes."""
        return {tuple(self.documents[number]) for number in self.holes}


def make_prompts(
    cases: Sequence[Case],
    ids: Sequence[Place],
    positions: Sequence[Place],
    inflate: int = 0,
    separator: Sequence[int] = (),
) -> list[Prompt]:
    """A prompt of each case, with so many documents of other cases behind its own.

    The own documents with these numbers are holes; the n-th of them stands at the n-th position among all documents. No
    prompt takes a text that is a hole anywhere: it would be computed before.
    """
    if len(ids) != len(positions):
        raise ValueError(f"{len(ids)} hole ids and {len(positions)} hole positions; give one position for each hole")
    chosen, reserved = list[list[int]](), set[tuple[int, ...]]()
    for at, case in enumerate(cases):
        chosen.append(_numbers(ids, len(case.documents), f"hole ids of query {at}"))
        reserved |= {tuple(case.documents[number]) for number in chosen[at]}
    prompts = []
    for at, (case, holes) in enumerate(zip(cases, chosen, strict=True)):
        others = list(islice(_of_others(cases, at, reserved), inflate))
        if len(others) < inflate:
            raise ValueError(
                f"{inflate} documents of other queries were asked for, but query {at} finds {len(others)} that are no "
                "holes; ask for fewer, or use more queries"
            )
        documents = [*case.documents, *others]
        places = dict(zip(_numbers(positions, len(documents), f"hole positions of query {at}"), holes, strict=True))
        rest = iter([number for number in range(len(documents)) if number not in holes])
        order = [places[place] if place in places else next(rest) for place in range(len(documents))]
        documents = [documents[number] for number in order]
        prompts.append(Prompt(case.header, documents, set(places), case.questions[0], list(separator)))
    return prompts


def before(prompts: Sequence[Prompt]) -> list[Tokens]:
    """What is computed before the queries, each once: the headers, and every text that is no hole of any query."""
    reserved = {text for prompt in prompts for text in prompt.missing}
    units: dict[tuple[int, ...], None] = {}
    for prompt in prompts:
        units[tuple(prompt.head)] = None
        for document in prompt.documents:
            if tuple(document) not in reserved:
                units[(*document, *prompt.separator)] = None
    return [list(unit) for unit in units if unit]


def _of_others(cases: Sequence[Case], at: int, reserved: set[tuple[int, ...]]) -> Iterator[Tokens]:
    """Round after round through the queries that follow this one, each time the next document of each."""
    for turn in range(max(len(case.documents) for case in cases)):
        for other in (cases[(at + further) % len(cases)] for further in range(1, len(cases))):
            if turn < len(other.documents) and tuple(other.documents[turn]) not in reserved:
                yield other.documents[turn]


def _numbers(places: Sequence[Place], documents: int, what: str) -> list[int]:
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
