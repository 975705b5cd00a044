"""Prompts as tensors to train on: each with many questions, and what inner layers should know at some tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from benchmarks.quality.reader import words as w
from benchmarks.quality.reader.task import STRATA, Fact, Prompt, Question

ASKED = 3
"""Tokens of a question."""
LONGEST = 2040
"""Positions that training spreads a prompt over."""


@dataclass(frozen=True)
class Known:
    """What is meant at tokens of the batch: ``rows`` and ``places`` say where, the others what."""

    rows: Tensor
    places: Tensor
    entities: Tensor
    relations: Tensor
    """-100 where there is none."""


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    """``[prompts, tokens + 3 * questions]``: prompts, padded, and behind them their questions."""
    positions: Tensor
    documents: Tensor
    """Of the prompts' tokens; -1 in the header, -2 in the padding."""
    answers: Tensor
    strata: Tensor
    read: Tensor
    """``[prompts, questions, prompt tokens]``: the share of attention that belongs to each token.

    All of it to the value that answers; for a number equal shares to all values of the entity, and to the first token:
    what the first one gets says how many there are.
    """
    named: Tensor
    """Where the header has the nickname that a question uses; -100 where it uses none."""
    early: Known
    middle: Known
    late: Known

    @property
    def prompt_tokens(self) -> int:
        return self.documents.shape[1]

    @property
    def questions(self) -> int:
        return self.answers.shape[1]


def make_batch(
    rng: random.Random, prompts: Sequence[Prompt], questions: int, weights: Sequence[float], spread: bool, alone: bool
) -> Batch:
    """``weights``: how often questions of each stratum are asked. ``spread``: at positions with gaps between sentences.

    ``alone``: only what can be known if every document is computed alone.
    """
    bodies = [[*one.header, *(token for document in one.documents for token in document)] for one in prompts]
    longest = max(map(len, bodies))
    rows, places, documents, answers, strata, read, named = [], [], [], [], [], [], []
    known: tuple[list[tuple[int, ...]], ...] = ([], [], [])
    for row, (prompt, body) in enumerate(zip(prompts, bodies, strict=True)):
        padding = longest - len(body)
        asked = _choose(rng, prompt.questions, questions, weights, alone)
        rows.append(body + [w.PAD] * padding + [token for one in asked for token in one.tokens])
        at = _positions(rng, body) if spread else list(range(len(body)))
        places.append(at + [0] * padding + [at[-1] + 1 + step for _ in asked for step in range(ASKED)])
        lengths = [len(prompt.header), *map(len, prompt.documents), padding]
        numbers = [-1, *range(len(prompt.documents)), -2]
        documents.append([n for n, length in zip(numbers, lengths, strict=True) for _ in range(length)])
        answers.append([one.answer for one in asked])
        strata.append([STRATA.index(one.stratum) for one in asked])
        named.append([_naming(prompt, one.tokens[1]) for one in asked])
        read.append(_read(prompt, asked, longest))
        for level, found in zip(known, _known(prompt, asked, longest, alone), strict=True):
            level += [(row, *one) for one in found]
    return Batch(
        torch.tensor(rows), torch.tensor(places), torch.tensor(documents), torch.tensor(answers), torch.tensor(strata),
        torch.tensor(read),
        torch.tensor(named),
        *(Known(*torch.tensor(level or [(0, 0, -100, -100)]).T) for level in known),
    )  # fmt: skip


def _read(prompt: Prompt, asked: Sequence[Question], longest: int) -> list[list[float]]:
    begins = _begins(prompt)
    facts, nicknames = _facts(prompt), _nicknames(prompt)
    shares = []
    for _, subject, word in (one.tokens for one in asked):
        if subject == w.COUNT:
            found = [one for one in prompt.facts if one.subject == word]
        else:
            found = [facts[nicknames.get(subject, subject), word]]
        places = [begins[one.document] + one.position for one in found] + [0] * (subject == w.COUNT)
        share = [0.0] * longest
        for place in places:
            share[place] = 1 / len(places)
        shares.append(share)
    return shares


def _naming(prompt: Prompt, subject: int) -> int:
    return prompt.header.index(subject) if subject in w.NICKNAME else -100


def _begins(prompt: Prompt) -> list[int]:
    """Where each document begins."""
    return list(accumulate(map(len, prompt.documents[:-1]), initial=len(prompt.header)))


def _facts(prompt: Prompt) -> dict[tuple[int, int], Fact]:
    """Facts by entity and either word for their relation."""
    words = (w.RELATION, w.SYNONYM)
    return {(one.subject, word[one.relation]): one for one in prompt.facts for word in words}


def _nicknames(prompt: Prompt) -> dict[int, int]:
    header = prompt.header
    return {header[place + 1]: header[place - 1] for place, token in enumerate(header) if token == w.ALIAS}


def _choose(
    rng: random.Random, questions: Sequence[Question], number: int, weights: Sequence[float], alone: bool
) -> list[Question]:
    """With replacement: without it a model learns that what was asked is not asked again."""
    strata = ("plain", "local") if alone else STRATA
    by = {stratum: [one for one in questions if one.stratum == stratum] for stratum in strata}
    there = [stratum for stratum in strata if by[stratum]]
    chosen = rng.choices(there, [weights[STRATA.index(stratum)] for stratum in there], k=number)
    return [rng.choice(by[stratum]) for stratum in chosen]


def _positions(rng: random.Random, body: Sequence[int]) -> list[int]:
    """Positions with gaps behind some full stops, as if sentences stood there."""
    gaps = [0.0] * len(body)
    for place in range(1, len(body)):
        if body[place - 1] == w.STOP and rng.random() < 0.15:
            gaps[place] = rng.expovariate(1)
    scale = (LONGEST - len(body)) * rng.random() / (sum(gaps) or 1)
    positions, ahead = [], 0.0
    for place, gap in enumerate(gaps):
        ahead += gap * scale
        positions.append(place + int(ahead))
    return positions


_Known: TypeAlias = tuple[int, int, int]


def _known(prompt: Prompt, asked: Sequence[Question], longest: int, alone: bool) -> tuple[list[_Known], ...]:
    """What should be known at early, middle and late layers: places, entities, relations."""
    begins = _begins(prompt)
    early, middle, late = list[_Known](), list[_Known](), list[_Known]()
    local = set[tuple[int, int]]()
    for fact in prompt.facts:
        if alone and fact.stratum not in ("plain", "local"):
            continue
        place = begins[fact.document] + fact.position
        entity, relation = fact.subject - w.NAME[0], fact.relation
        early.append((place, entity if fact.stratum in ("plain", "split") else -100, relation))
        late.append((place, entity, relation))
        if fact.stratum == "local":
            local.add((fact.document, _subject_place(prompt, fact)))
    for number, references in enumerate(prompt.meant):
        for offset, entity in references.items():
            if alone and (number, offset) not in local:
                continue
            chained = prompt.documents[number][offset] == w.THEM
            (early if chained else middle).append((begins[number] + offset, entity - w.NAME[0], -100))
    facts, nicknames = _facts(prompt), _nicknames(prompt)
    early += [(prompt.header.index(one), entity - w.NAME[0], -100) for one, entity in nicknames.items()]
    for number, question in enumerate(asked):
        place = longest + ASKED * number
        _, subject, word = question.tokens
        if subject == w.COUNT:
            late.append((place + 2, word - w.NAME[0], -100))
            continue
        entity = nicknames.get(subject, subject)
        if entity != subject:
            middle.append((place + 1, entity - w.NAME[0], -100))
        late.append((place + 2, entity - w.NAME[0], facts[entity, word].relation))
    return early, middle, late


def _subject_place(prompt: Prompt, fact: Fact) -> int:
    """Where in its document a fact about "it" says so."""
    return max(place for place in prompt.meant[fact.document] if place < fact.position)
