"""The prompts: which documents are holes, where they stand, what is computed before, in a model's own tokens."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

from research.holes.places import Place, numbers_of

Tokens: TypeAlias = list[int]
Order: TypeAlias = Literal["turns", "same"]
"""Which documents of other queries make a prompt longer: those of the queries that follow, in turn, or the same ones
behind every query, as in the published benchmark."""
INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
)
CONTENT = "\u241f"
"""Stands for what a user says, in a chat template."""


class Query(NamedTuple):
    """A question to several documents, in tokens."""

    header: Tokens
    documents: list[Tokens]
    question: Tokens
    answers: list[str]


class Prompt(NamedTuple):
    """One query, its documents in the order in which the prompt has them."""

    query: Query
    documents: list[Tokens]
    holes: set[int]
    """The numbers of the documents that nothing computes before the query."""
    separator: Tokens
    """Stands behind the header, and behind each document."""

    @property
    def tokens(self) -> Tokens:
        parts = (part for document in self.documents for part in (*document, *self.separator))
        return [*self.head, *parts, *self.query.question]

    @property
    def head(self) -> Tokens:
        return [*self.query.header, *self.separator]

    @property
    def missing(self) -> set[tuple[int, ...]]:
        """The texts of the holes."""
        return {tuple(self.documents[number]) for number in self.holes}


class Writer:
    """Writes queries. Each document is tokenized by itself, so that it is the same tokens wherever it stands."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` is one of transformers."""
        self._tokenizer = tokenizer
        self._before, self._behind = "", ""
        if tokenizer.chat_template:
            said = [{"role": "user", "content": CONTENT}]
            # Templates without such a switch ignore it; with it, models would think before they answer.
            whole = tokenizer.apply_chat_template(
                said, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            self._before, _, self._behind = whole.partition(CONTENT)

    @property
    def stop(self) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [int(end)]

    def query(
        self, documents: Sequence[Any], question: Any, answers: list[str], most_document_tokens: int | None
    ) -> Query:
        """Raises ValueError if its answers are not known, or if it is not text."""
        if not answers or not all(isinstance(text, str) for text in (*documents, question)):
            raise ValueError(f"the question {question!r} should be text, and have an answer to compare with")
        return Query(
            self.tokens(self._before + INSTRUCTION, add_special_tokens=not self._before),
            [self.tokens(f"{document}\n\n")[:most_document_tokens] for document in documents],
            self.tokens(f"\n\nQuestion: {question}\nAnswer:{self._behind}"),
            answers,
        )

    def tokens(self, text: str, add_special_tokens: bool = False) -> Tokens:
        tokens: Tokens = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tokens

    def first_line(self, answer: Tokens) -> str:
        """Models go on to further questions behind the first line of their answer."""
        text: str = self._tokenizer.decode(answer, skip_special_tokens=True)
        return text.strip().partition("\n")[0]


def make_prompts(
    queries: Sequence[Query],
    ids: Sequence[Place],
    positions: Sequence[Place],
    inflate: int = 0,
    separator: Sequence[int] = (),
    order: Order = "turns",
) -> list[Prompt]:
    """A prompt of each query, with so many documents of other queries behind its own.

    The own documents with these numbers are holes; the n-th of them stands at the n-th position among all documents. No
    prompt takes a text that is a hole anywhere: it would be computed before.
    """
    if len(ids) != len(positions):
        raise ValueError(f"{len(ids)} hole ids and {len(positions)} hole positions; give one position for each hole")
    numbers = [numbers_of(ids, len(query.documents), f"hole ids of query {at}") for at, query in enumerate(queries)]
    reserved = {
        tuple(query.documents[number]) for query, holes in zip(queries, numbers, strict=True) for number in holes
    }
    prompts = []
    for at, (query, holes) in enumerate(zip(queries, numbers, strict=True)):
        candidates = (document for document in _of_others(queries, at, order) if tuple(document) not in reserved)
        others = list(islice(candidates, inflate))
        if len(others) < inflate:
            raise ValueError(
                f"{inflate} documents of other queries were asked for, but query {at} finds {len(others)} that are no "
                "holes; ask for fewer, or use more queries"
            )
        documents = [*query.documents, *others]
        places = dict(zip(numbers_of(positions, len(documents), f"hole positions of query {at}"), holes, strict=True))
        rest = iter([number for number in range(len(documents)) if number not in holes])
        placed = [places[place] if place in places else next(rest) for place in range(len(documents))]
        prompts.append(Prompt(query, [documents[number] for number in placed], set(places), list(separator)))
    return prompts


def before(prompts: Sequence[Prompt]) -> list[Tokens]:
    """The texts to compute before the queries, each once: headers, and all documents that are no hole of any query."""
    reserved = {text for prompt in prompts for text in prompt.missing}
    units: dict[tuple[int, ...], None] = {}
    for prompt in prompts:
        units[tuple(prompt.head)] = None
        for document in prompt.documents:
            if tuple(document) not in reserved:
                units[(*document, *prompt.separator)] = None
    return [list(unit) for unit in units if unit]


def _of_others(queries: Sequence[Query], at: int, order: Order) -> Iterator[Tokens]:
    if order == "same":
        yield from (document for number, query in enumerate(queries) if number != at for document in query.documents)
        return
    for turn in range(max(len(query.documents) for query in queries)):
        for other in (queries[(at + further) % len(queries)] for further in range(1, len(queries))):
            if turn < len(other.documents):
                yield other.documents[turn]
