"""Prompts of documents that state facts, and the questions to them; pure: the same seed makes the same prompt.

A prompt is a header (nicknames of entities, a first partner, a first topic), documents, and behind them one question.
A document states facts between sentences of no meaning::

    document the back . Anna even colour coral . it city cabin about Boris . job after it lemon with Clara .

- ``it`` is the entity of the latest ``about``, ``them`` that of the latest ``with``, in this document or before it.
- A fact may begin at the end of one document and end at the head of the next.
- Facts have 3 to 12 tokens, words of no meaning in them, subject and relation in either order, the value behind both,
  and a full stop or none. So where a fact can be read, and how far from its subject, differs.

A token *depends* if what it means is settled by text outside its document.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from benchmarks.quality.reader import words as w

Split = Literal["train", "test"]
STRATA = ("plain", "local", "cross", "split", "chained", "alias", "counting")
OTHERS = 1_000_000
"""Seeds from here on make prompts of which only the headers are used."""
MOST_FACTS = len(w.NUMBER)
"""The most facts of one entity, which a question for a number can be answered with."""


@dataclass(frozen=True)
class Shape:
    """How large prompts are, and how dense; ranges include both ends."""

    documents: tuple[int, int] = (8, 10)
    document_tokens: tuple[int, int] = (100, 250)
    prompt_tokens: tuple[int, int] = (1000, 2000)
    plain: tuple[int, int] = (2, 4)
    """Facts of a document that name their subject."""
    references: tuple[int, int] = (1, 3)
    """Facts of a document whose subject is ``it``, before and again behind a change of topic."""
    dependent: tuple[float, float] = (0.05, 0.10)
    """Share of the documents' tokens."""
    padded: float = 0.6
    """Share of facts with words of no meaning in them."""


@dataclass(frozen=True)
class Fact:
    subject: int
    relation: int
    synonym: bool
    """Whether it is stated with the other word for its relation."""
    value: int
    stratum: str
    document: int
    position: int
    """The position of the value in its document."""


@dataclass(frozen=True)
class Question:
    tokens: list[int]
    answer: int
    stratum: str


@dataclass
class Prompt:
    header: list[int]
    documents: list[list[int]]
    questions: list[Question] = field(default_factory=list)
    """Every question that the prompt answers; each is asked alone, right behind the last document."""
    dependent: list[set[int]] = field(default_factory=list)
    """For each document the positions in it of tokens that depend on text outside it."""
    facts: list[Fact] = field(default_factory=list)


def make_prompt(seed: int, split: Split, shape: Shape = Shape()) -> Prompt:
    """The first prompt of this seed that has the sizes asked for. No prompt can be of both splits."""
    rng = random.Random(f"{split} {seed}")
    while True:
        prompt = _Writer(rng, split, shape).prompt()
        tokens = sum(map(len, prompt.documents))
        depends = sum(map(len, prompt.dependent)) / tokens
        low, high = shape.prompt_tokens
        if low <= len(prompt.header) + tokens <= high and shape.dependent[0] <= depends <= shape.dependent[1]:
            return prompt


def headers() -> Iterator[list[int]]:
    """Headers of no prompt of the test half."""
    return (make_prompt(OTHERS + number, "train").header for number in count())


def _split_of(topic: int, partner: int) -> Split:
    return "test" if (topic + partner) % 8 == 0 else "train"


@dataclass
class _Sentence:
    tokens: list[int]
    facts: list[tuple[int, Fact]] = field(default_factory=list)
    """The facts, each with the place of the value in the sentence."""
    depends: bool = False


@dataclass
class _Topic:
    entity: int
    document: int
    chained: bool = False


class _Writer:
    """Writes one prompt from its begin to its end."""

    def __init__(self, rng: random.Random, split: Split, shape: Shape) -> None:
        self._rng, self._shape = rng, shape
        self._names = rng.sample(w.NAME, len(w.NAME))
        topic = self._names.pop()
        partner = next(name for name in self._names if _split_of(topic, name) == split)
        self._names.remove(partner)
        self._topic, self._partner = _Topic(topic, -1), partner
        self._opening = [w.WITH, partner, w.STOP, w.ABOUT, topic, w.STOP]
        # Few relations for facts about "it", so that the same relation is stated of several topics.
        self._shared = rng.sample(range(len(w.RELATION)), 5)
        self._used: set[tuple[int, int]] = set()
        self._stated: Counter[int] = Counter()
        self._made = Prompt([], [])

    def prompt(self) -> Prompt:
        number = self._rng.randint(*self._shape.documents)
        head: _Sentence | None = None
        for document in range(number):
            head = self._document(document, head, last=document == number - 1)
        nicknames = self._nicknames()
        for nickname, entity in nicknames.items():
            self._made.header += [entity, w.ALIAS, nickname, w.STOP]
        self._made.header = [w.BOS, *self._made.header, *self._opening]
        self._ask({entity: nickname for nickname, entity in nicknames.items()})
        return self._made

    def _document(self, number: int, tail: _Sentence | None, last: bool) -> _Sentence | None:
        """Write a document, ``tail`` first; what comes back is to be the next document's first sentence."""
        rng, shape = self._rng, self._shape
        sentences = self._sentences(number)
        begun = None if last or rng.random() > 0.6 else self._broken(number + 1)
        fixed = 1 + sum(len(one.tokens) for one in (*sentences, tail, begun and begun[0]) if one)
        for filler in self._fillers(max(0, rng.randint(*shape.document_tokens) - fixed)):
            sentences.insert(rng.randint(0, len(sentences)), filler)
        tokens, dependent = [w.DOCUMENT], set[int]()
        for one in (tail, *sentences, begun and begun[0]):
            if one is None:
                continue
            here = len(tokens)
            if one.depends:
                dependent |= set(range(here, here + len(one.tokens)))
            for place, fact in one.facts:
                self._made.facts.append(replace(fact, position=here + place))
            tokens += one.tokens
        self._made.documents.append(tokens)
        self._made.dependent.append(dependent)
        return begun and begun[1]

    def _sentences(self, number: int) -> list[_Sentence]:
        """What a document says, in order; topic and partner change on the way."""
        rng, shape = self._rng, self._shape
        turn = rng.choices(("none", "name", "them"), (0.35, 0.5, 0.15))[0]
        introduces = rng.random() < 0.45
        before, behind = ["plain"] * rng.randint(*shape.plain), list[str]()
        before += ["it"] * rng.randint(*shape.references)
        if turn != "none":
            cut = rng.randint(0, len(before) - 1)
            rng.shuffle(before)
            before, behind = before[:cut], [*before[cut:], *["it"] * rng.randint(*shape.references)]
        if introduces:
            # A partner that this document names is not the one that it means: "them" is settled elsewhere.
            (behind if turn == "them" else before).append("with")
        rng.shuffle(before)
        rng.shuffle(behind)
        order = [*before, *([turn] if turn != "none" else []), *behind]
        return [one for one in (self._sentence(kind, number) for kind in order) if one]

    def _sentence(self, kind: str, number: int) -> _Sentence | None:
        if kind == "with":
            self._partner = self._names.pop()
            return _Sentence([w.WITH, self._partner, w.STOP])
        if kind == "name":
            self._topic = _Topic(self._names.pop(), number)
            return _Sentence([w.ABOUT, self._topic.entity, w.STOP])
        if kind == "them":
            self._topic = _Topic(self._partner, number, chained=True)
            return _Sentence([w.ABOUT, w.THEM, w.STOP], depends=True)
        if kind == "plain":
            entity = self._rng.choice(self._names[:16] if self._rng.random() < 0.8 else [*w.NAME])
            return self._fact(entity, entity, self._rng.randrange(len(w.RELATION)), "plain", number)
        topic = self._topic
        stratum = "chained" if topic.chained else "local" if topic.document == number else "cross"
        return self._fact(w.IT, topic.entity, self._rng.choice(self._shared), stratum, number)

    def _fact(self, subject: int, entity: int, relation: int, stratum: str, number: int) -> _Sentence | None:
        """A sentence, or None where the entity has such a fact, or too many facts."""
        if (entity, relation) in self._used or self._stated[entity] == MOST_FACTS:
            return None
        self._used.add((entity, relation))
        self._stated[entity] += 1
        rng = self._rng
        synonym = rng.random() < 0.5
        value = rng.choice(w.VALUE)
        words = [subject, (w.SYNONYM if synonym else w.RELATION)[relation]]
        if rng.random() < 0.3:
            words.reverse()
        padding = rng.randint(1, 8) if rng.random() < self._shape.padded else 0
        gaps = Counter(rng.choices(range(3), (3, 3, 2), k=padding))
        tokens = [words[0], *self._words(gaps[0]), words[1], *self._words(gaps[1]), value, *self._words(gaps[2])]
        if rng.random() < 0.7:
            tokens.append(w.STOP)
        fact = Fact(entity, relation, synonym, value, stratum, number, 0)
        return _Sentence(tokens, [(3 + gaps[0] + gaps[1] - 1, fact)], depends=stratum not in ("plain", "local"))

    def _broken(self, number: int) -> tuple[_Sentence, _Sentence] | None:
        """A fact's begin, and its end with the value, which depends on the begin."""
        entity = self._rng.choice(self._names[:16])
        whole = self._fact(entity, entity, self._rng.randrange(len(w.RELATION)), "split", number)
        if whole is None:
            return None
        place, fact = whole.facts[0]
        cut = self._rng.randint(1, place)
        return _Sentence(whole.tokens[:cut]), _Sentence(whole.tokens[cut:], [(place - cut, fact)], depends=True)

    def _fillers(self, tokens: int) -> list[_Sentence]:
        """Sentences of no meaning with so many tokens in all."""
        made = []
        while tokens:
            length = min(tokens, self._rng.randint(3, 14))
            made.append(_Sentence([*self._words(length - 1), w.STOP]))
            tokens -= length
        return made

    def _words(self, number: int) -> list[int]:
        return self._rng.choices(w.FILLER, k=number)

    def _nicknames(self) -> dict[int, int]:
        """Names for some entities that facts are stated about with "it" in another document than theirs."""
        meant = sorted({fact.subject for fact in self._made.facts if fact.stratum == "cross"})
        chosen = self._rng.sample(meant, min(len(meant), 6))
        return dict(zip(self._rng.sample(w.NICKNAME, len(chosen)), chosen, strict=True))

    def _ask(self, nicknames: dict[int, int]) -> None:
        asked = self._made.questions
        for fact in self._made.facts:
            same, other = (w.SYNONYM, w.RELATION) if fact.synonym else (w.RELATION, w.SYNONYM)
            asked.append(Question([w.QUESTION, fact.subject, same[fact.relation]], fact.value, fact.stratum))
            if fact.stratum == "cross" and fact.subject in nicknames:
                tokens = [w.QUESTION, nicknames[fact.subject], other[fact.relation]]
                asked.append(Question(tokens, fact.value, "alias"))
        for entity, number in Counter(fact.subject for fact in self._made.facts).items():
            if number == 1 and self._rng.random() < 0.7:
                continue  # Most entities have one fact; so many easy questions would hide how well it counts.
            asked.append(Question([w.QUESTION, w.COUNT, entity], w.NUMBER[number - 1], "counting"))
