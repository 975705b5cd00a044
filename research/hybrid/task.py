"""Questions about documents: what is the value of a key, and what is the title of the document that says so?

A document bears its title at its beginning, or it is *unnamed* and the end of the text before it says the title.
"""

import random
from typing import NamedTuple

PAD, DOCUMENT, UNNAMED, NEXT, IS, STOP, ASK, SYSTEM = range(8)
TITLES, KEYS, VALUES, FILLERS = range(8, 24), range(24, 36), range(36, 68), range(68, 116)
WORDS = 116

Pair = tuple[int, int]


class Level(NamedTuple):
    """How hard a prompt is."""

    documents: tuple[int, int]
    facts: tuple[int, int]
    length: tuple[int, int]
    unnamed: float


LEVELS = (
    Level((1, 2), (3, 4), (0, 0), 0),
    Level((2, 4), (3, 5), (0, 50), 0.15),
    Level((3, 6), (4, 6), (40, 80), 0.3),
)


class Fact(NamedTuple):
    key: Pair
    value: Pair

    @property
    def tokens(self) -> list[int]:
        return [*self.key, IS, *self.value, STOP]


class Document(NamedTuple):
    facts: list[Fact]
    tokens: list[int]


class Question(NamedTuple):
    fact: Fact
    title: Pair

    @property
    def tokens(self) -> list[int]:
        """Up to the answer."""
        return [ASK, *self.fact.key, IS]

    @property
    def answer(self) -> tuple[int, ...]:
        return (*self.fact.value, *self.title)


class Prompt(NamedTuple):
    system: list[int]
    documents: list[Document]
    questions: list[Question]
    """All that can be asked, in random order."""


def pairs(rng: random.Random, words: range, count: int) -> list[Pair]:
    grid = [(a, b) for a in words for b in words]
    return rng.sample(grid, count)


def document(rng: random.Random, level: Level, title: Pair | None, keys: list[Pair], following: Pair) -> Document:
    facts = [Fact(key, (rng.choice(VALUES), rng.choice(VALUES))) for key in keys]
    sentences = [fact.tokens for fact in facts]
    length = 6 + sum(map(len, sentences))
    aim = rng.randint(*level.length)
    while length < aim:
        filler = [rng.choice(FILLERS) for _ in range(min(rng.randint(2, 7), aim - length))]
        filler[-1] = STOP
        sentences.insert(rng.randint(0, len(sentences)), filler)
        length += len(filler)
    head = [DOCUMENT, *(title or (UNNAMED, UNNAMED))]
    return Document(facts, [*head, *(t for s in sentences for t in s), NEXT, *following])


def prompt(rng: random.Random, level: Level, count: int) -> Prompt:
    keys = pairs(rng, KEYS, count * level.facts[1])
    titles = pairs(rng, TITLES, 2 * count + 1)
    nexts = titles[count:]
    system = [SYSTEM, *(rng.choice(FILLERS) for _ in range(rng.randint(4, 12))), NEXT, *nexts[0]]
    documents, questions = [], []
    for n in range(count):
        named = titles[n] if rng.random() >= level.unnamed else None
        picked = [keys.pop() for _ in range(rng.randint(*level.facts))]
        documents.append(document(rng, level, named, picked, nexts[n + 1]))
        questions += [Question(fact, named or nexts[n]) for fact in documents[-1].facts]
    rng.shuffle(questions)
    return Prompt(system, documents, questions)


def batch(rng: random.Random, level: Level, size: int, asked: int) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens, and for each the one that should follow if it is of an answer, ``PAD`` else."""
    count = rng.randint(*level.documents)
    rows, answers = [], []
    for _ in range(size):
        one = prompt(rng, level, count)
        tokens = [*one.system, *(t for d in one.documents for t in d.tokens)]
        wanted = [PAD] * len(tokens)
        for question in one.questions[:asked]:
            tokens += [*question.tokens, *question.answer, STOP]
            wanted += [*[PAD] * 3, *question.answer, PAD, PAD]
        rows.append(tokens)
        answers.append(wanted)
    longest = max(map(len, rows))
    return tuple([[*row, *[PAD] * (longest - len(row))] for row in each] for each in (rows, answers))
