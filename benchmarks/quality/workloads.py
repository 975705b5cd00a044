"""The prompts that a real model is asked, and the earlier ones in which their text was computed.

Questions to the same documents share a case, so that their KV can be computed once.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, count, islice
from typing import Any, TypeAlias

from benchmarks.quality.people import TextQuestion, older, people
from benchmarks.quality.sources import Dialogue, Request, Turn, dialogues, manual, requests, shuffled
from blendhub.core.layout import MIN_DONOR_CONTEXT

Tokens: TypeAlias = list[int]
QUESTIONS = 4
"""The most questions to one case."""
LONGEST = 4096
"""The most tokens of a prompt."""
ONE_WORD = "You answer questions about the documents with one word."
CLEARED = "[cleared]"
CUT = "\u241f"
"""Stands in messages where a piece ends."""


class Chat:
    """Writes prompts with a tokenizer's chat template, cut in pieces that are the same tokens wherever they stand."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def pieces(self, messages: Sequence[tuple[str, str]], begun: str = "") -> list[Tokens]:
        """Messages as pairs of role and content; ``begun`` is how the answer begins. Each piece is tokenized apart.

        A model that has learned no chat gets paragraphs, behind the token with which its texts begin.
        """
        if not self._tokenizer.chat_template:
            paragraphs = "\n\n".join(content for _, content in messages)
            first, *others = f"{paragraphs}\n{begun}".split(CUT)
            return [self._tokenizer.encode(first), *map(self.tokens, others)]
        said = [{"role": role, "content": content} for role, content in messages]
        text: str = self._tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        return [self.tokens(piece) for piece in (text + begun).split(CUT)]

    def tokens(self, text: str) -> Tokens:
        tokens: Tokens = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens


@dataclass(frozen=True)
class Question:
    tokens: Tokens
    """The rest of the prompt behind the case's body."""
    right: Tokens = field(default_factory=list)
    """How a right answer goes on; empty where full prefill's own answer is what counts."""

    def answered(self, said: Tokens) -> int:
        """How many of the tokens that were said are the right answer; 0 if it is wrong or not known."""
        return len(self.right) if said[: len(self.right)] == self.right else 0


@dataclass(frozen=True)
class Case:
    pieces: list[Tokens]
    """The header and the documents."""
    questions: list[Question]
    earlier: Tokens = field(default_factory=list)
    """The prompt in which the text was computed, where it was not computed among that of other cases."""

    @property
    def body(self) -> Tokens:
        return [token for piece in self.pieces for token in piece]


def visits(cases: Sequence[Case], until_deep: bool = False) -> list[Tokens]:
    """The prompts in which the text of these cases was computed before: every document once, among those of others.

    ``until_deep``: again and again, in other company each time, until each document has stood behind so much text that
    its KV may move. Text that stood in one prompt has no other visit.
    """
    if cases[0].earlier:
        return [case.earlier for case in cases]
    prompts: list[Tokens] = []
    shallow = {tuple(document) for case in cases for document in case.pieces[1:]}
    for number in count():
        if number and not (until_deep and shallow):
            break
        for visit in _round_of_visits(cases, random.Random(f"visits {number}")):
            prompt: Tokens = []
            for piece in visit:
                if len(prompt) >= MIN_DONOR_CONTEXT:
                    shallow.discard(tuple(piece))
                prompt += piece
            prompts.append(prompt)
    return prompts


def _round_of_visits(cases: Sequence[Case], rng: random.Random) -> Iterator[list[Tokens]]:
    """The header and the documents of each visit."""
    slots = max(len(case.pieces) for case in cases) - 1
    # A document goes so many cases further: neighbours part, and each finds those of other cases at its new place.
    further = [1 + number % max(1, len(cases) - 1) for number in range(slots)]
    rng.shuffle(further)
    together: list[list[Tokens]] = [[] for _ in cases]
    for home, case in enumerate(cases):
        for number, document in enumerate(case.pieces[1:]):
            together[(home + further[number]) % len(cases)].append(document)
    for documents in together:
        rng.shuffle(documents)
        visit = [cases[0].pieces[0]]
        for document in documents:
            if sum(map(len, visit)) + len(document) > LONGEST:
                yield visit
                visit = [cases[0].pieces[0]]
            visit.append(document)
        yield visit


def first_cases(workload: str, chat: Chat, questions: int) -> list[Case]:
    """Enough cases for so many questions, and at least two: each case's text is computed among that of another one."""
    chosen: list[Case] = []
    for case in WORKLOADS[workload](chat):
        if len(chosen) >= 2 and sum(len(other.questions) for other in chosen) >= questions:
            break
        chosen.append(case)
    return chosen


def facts(chat: Chat, across: bool = False) -> Iterator[Case]:
    for documents, questions in biographies(across):
        yield case_of(chat, ONE_WORD, documents, questions)


def biographies(across: bool = False) -> Iterator[tuple[list[str], list[TextQuestion]]]:
    """Documents, and questions to one of them each, or ``across`` two."""
    rng = random.Random(f"facts test {across}")
    everyone = people(rng)
    while True:
        persons = list(islice(everyone, rng.randint(6, 12)))
        if across:
            questions = [older(*pair) for pair in rng.sample(list(combinations(persons, 2)), QUESTIONS)]
        else:
            questions = [rng.choice(person.questions) for person in rng.sample(persons, QUESTIONS)]
        yield [f"Document: {person.text}\n\n" for person in persons], questions


def of_manual(chat: Chat) -> Iterator[Case]:
    """Sections of different topics. A passage is to be continued, or a statement explained."""
    rng = random.Random("manual test")
    sections = [(topic[0].split("\n")[0], section) for topic in manual() for section in topic]
    rng.shuffle(sections)
    while len(sections) >= 8:
        chosen = [sections.pop() for _ in range(rng.randint(4, 8))]
        asked = enumerate(rng.sample(chosen, min(QUESTIONS, len(chosen))))
        questions = [about_section(*section, rng)[number % 2] for number, section in asked]
        documents = [f"Section of {title}:\n\n{section}" for title, section in chosen]
        yield case_of(chat, "You answer questions about the Python manual.", documents, questions)


def about_section(title: str, section: str, rng: random.Random) -> tuple[TextQuestion, TextQuestion]:
    words = section.split()
    begin = rng.randrange(len(words) // 2)
    passage, following = " ".join(words[begin : begin + 10]), " ".join(words[begin + 10 : begin + 13])
    return (
        TextQuestion("Continue this passage of the manual.", passage, f" {following}"),
        TextQuestion(f"What does the manual say about {title}?", f"About {title}, the manual says", ""),
    )


def tools(chat: Chat) -> Iterator[Case]:
    """The functions of several requests; each request is a question."""
    rng = random.Random("tools test")
    left = shuffled(requests(), "tools test")
    spare = [pair for request in left for pair in request.functions.items()]
    while left:
        most, functions, chosen = rng.randint(8, 16), dict[str, str](), list[Request]()
        for request in list(left):
            if len(functions | request.functions) <= most and len(chosen) < QUESTIONS:
                functions |= request.functions
                chosen.append(request)
                left.remove(request)
        while len(functions) < most:
            functions |= [rng.choice(spare)]
        texts = [f"{text}\n\n" for text in shuffled(list(functions.values()), str(len(left)))]
        system = ("system", "You call one of these functions.\n\n" + CUT + CUT.join(texts) + CUT)
        begun = 'The function for this is "'
        prompts = [chat.pieces([system, ("user", request.text)], begun) for request in chosen]
        yield _case(prompts, [chat.tokens(request.right) for request in chosen])


def edits(chat: Chat) -> Iterator[Case]:
    """Dialogues whose tool results, but the last, are cleared when the user speaks again."""
    for shorter in range(3):
        for dialogue in shuffled(dialogues(), "edits test"):
            *before, last = dialogue.turns[: len(dialogue.turns) - shorter]
            if len(before) >= 2:
                cleared = [turn._replace(result=CLEARED) for turn in before[:-1]] + before[-1:]
                *pieces, tail = chat.pieces([*_messages(dialogue, cleared), ("user", last.user)])
                earlier = [token for piece in chat.pieces(_messages(dialogue, before)) for token in piece]
                yield Case(pieces, [Question(tail)], earlier)


WORKLOADS: dict[str, Callable[[Chat], Iterator[Case]]] = {
    "facts": facts,
    "across": partial(facts, across=True),
    "tools": tools,
    "manual": of_manual,
    "edits": edits,
}


def case_of(chat: Chat, system: str, documents: list[str], questions: list[TextQuestion]) -> Case:
    """Documents behind a system text, and the questions that are asked behind them."""
    body = CUT + CUT.join(documents) + CUT
    prompts = [
        chat.pieces([("system", system), ("user", f"{body}Question: {question.question}")], question.begun)
        for question in questions
    ]
    return _case(prompts, [chat.tokens(question.right) for question in questions])


def _case(prompts: list[list[Tokens]], right: list[Tokens]) -> Case:
    """Prompts that differ in their last piece, and their right answers."""
    return Case(prompts[0][:-1], [Question(prompt[-1], answer) for prompt, answer in zip(prompts, right, strict=True)])


def _messages(dialogue: Dialogue, turns: list[Turn]) -> list[tuple[str, str]]:
    """Each message is a piece."""
    functions = "\n".join(dialogue.functions.values())
    messages = [("system", f"You act by calling these functions:\n{functions}{CUT}")]
    for turn in turns:
        messages += [("user", turn.user + CUT), ("assistant", turn.calls + CUT), ("tool", turn.result + CUT)]
    return messages
