"""The prompts that a real model is asked, and the earlier ones in which their text was computed.

Questions to the same documents share a case, so that their KV can be computed once.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, islice, repeat

from benchmarks.quality.real.chat import CUT, Chat
from benchmarks.quality.real.people import Asked, Half, older, people
from benchmarks.quality.real.sources import Dialogue, Request, Turn, dialogues, manual, requests, shuffled
from benchmarks.quality.workload import Case, Tokens, make_visits

QUESTIONS = 4
"""The most questions to one case."""
LONGEST = 4096
"""The most tokens of a prompt."""
ONE_WORD = "You answer questions about the documents with one word."
CLEARED = "[cleared]"


@dataclass(frozen=True)
class RealQuestion:
    tokens: Tokens
    """The rest of the prompt behind the case's body."""
    right: Tokens = field(default_factory=list)
    """How a right answer goes on; empty where full prefill's own answer is what counts."""

    def answered(self, said: Tokens) -> int:
        """How many of the tokens that were said are the right answer; 0 if it is wrong or not known."""
        return len(self.right) if said[: len(self.right)] == self.right else 0


@dataclass(frozen=True)
class RealCase:
    pieces: list[Tokens]
    """The header and the documents."""
    questions: list[RealQuestion]
    earlier: Tokens = field(default_factory=list)
    """The prompt in which the text was computed, where it was not computed among that of other cases."""

    @property
    def body(self) -> Tokens:
        return [token for piece in self.pieces for token in piece]


def earlier(cases: list[RealCase], headers: Iterator[Tokens] | None = None, longest: int = LONGEST) -> list[Tokens]:
    """The prompts in which the text of these cases was computed before, behind ``headers`` or behind their own."""
    own = [case.earlier for case in cases if case.earlier]
    if own:
        return own
    return make_visits(_documents(cases), headers or repeat(cases[0].pieces[0]), longest)


def again(cases: list[RealCase]) -> list[Tokens]:
    """Other prompts, in which the documents were computed once more. Text that stands in one prompt has none."""
    if any(case.earlier for case in cases):
        return []
    return make_visits(_documents(cases), repeat(cases[0].pieces[0]), LONGEST, seed="again")


def _documents(cases: list[RealCase]) -> list[Case]:
    return [Case(case.pieces[0], case.pieces[1:], []) for case in cases]


def facts(chat: Chat, half: Half, across: bool = False) -> Iterator[RealCase]:
    for documents, asked in biographies(half, across):
        yield case_of(chat, ONE_WORD, documents, asked)


def biographies(half: Half, across: bool = False) -> Iterator[tuple[list[str], list[Asked]]]:
    """Documents, and questions to one of them each, or ``across`` two."""
    rng = random.Random(f"facts {half} {across}")
    everyone = people(rng, half)
    while True:
        documents = list(islice(everyone, rng.randint(6, 12)))
        if across:
            asked = [older(*pair) for pair in rng.sample(list(combinations(documents, 2)), QUESTIONS)]
        else:
            asked = [rng.choice(one.questions) for one in rng.sample(documents, QUESTIONS)]
        yield [f"Document: {one.text}\n\n" for one in documents], asked


def across(chat: Chat, half: Half) -> Iterator[RealCase]:
    return facts(chat, half, across=True)


def of_manual(chat: Chat, half: Half) -> Iterator[RealCase]:
    """Sections of different topics. A passage is to be continued, or a statement explained."""
    rng = random.Random(f"manual {half}")
    sections = [(topic[0].split("\n")[0], section) for topic in manual(half) for section in topic]
    rng.shuffle(sections)
    system = "You answer questions about the Python manual."
    while len(sections) >= 8:
        chosen = [sections.pop() for _ in range(rng.randint(4, 8))]
        asked: list[Asked] = []
        for title, section in rng.sample(chosen, min(QUESTIONS, len(chosen))):
            words = section.split()
            begin = rng.randrange(len(words) // 2)
            passage = " ".join(words[begin : begin + 10])
            if len(asked) % 2:
                asked.append(Asked(f"What does the manual say about {title}?", f"About {title}, the manual says", ""))
            else:
                asked.append(Asked("Continue this passage of the manual.", passage, ""))
        yield case_of(chat, system, [f"Section of {title}:\n\n{section}" for title, section in chosen], asked)


def tools(chat: Chat, half: Half) -> Iterator[RealCase]:
    """The functions of several requests; each request is a question."""
    rng = random.Random(f"tools {half}")
    left: list[Request] = shuffled(requests(half), f"tools {half}")
    others = [pair for one in left for pair in one.functions.items()]
    while left:
        most, functions, asked = rng.randint(8, 16), dict[str, str](), list[Request]()
        for one in list(left):
            if len(functions | one.functions) <= most and len(asked) < QUESTIONS:
                functions |= one.functions
                asked.append(one)
                left.remove(one)
        while len(functions) < most:
            functions |= [rng.choice(others)]
        texts = [f"{text}\n\n" for text in shuffled(list(functions.values()), str(len(left)))]
        messages = ("system", "You call one of these functions.\n\n" + CUT + CUT.join(texts) + CUT)
        begun = 'The function for this is "'
        pieces = [chat.pieces([messages, ("user", one.text)], begun) for one in asked]
        questions = [RealQuestion(all[-1], chat.tokens(one.right)) for all, one in zip(pieces, asked, strict=True)]
        yield RealCase(pieces[0][:-1], questions)


def edits(chat: Chat, half: Half) -> Iterator[RealCase]:
    """Dialogues whose tool results, but the last, are cleared when the user speaks again."""
    those: list[Dialogue] = shuffled(dialogues(half), f"edits {half}")
    for shorter in range(3):
        for one in those:
            *before, last = one.turns[: len(one.turns) - shorter]
            if len(before) >= 2:
                cleared = [turn._replace(result=CLEARED) for turn in before[:-1]] + before[-1:]
                *pieces, tail = chat.pieces([*_said(one, cleared), ("user", last.user)])
                yield RealCase(pieces, [RealQuestion(tail)], chat.prompt(_said(one, before)))


WORKLOADS: dict[str, Callable[[Chat, Half], Iterator[RealCase]]] = {
    "facts": facts,
    "across": across,
    "tools": tools,
    "manual": of_manual,
    "edits": edits,
}


def case_of(chat: Chat, system: str, documents: list[str], asked: list[Asked]) -> RealCase:
    """Documents behind a system text, and the questions that are asked behind them."""
    body = CUT + CUT.join(documents) + CUT
    pieces = [
        chat.pieces([("system", system), ("user", f"{body}Question: {one.question}")], one.begun) for one in asked
    ]
    questions = [RealQuestion(all[-1], chat.tokens(one.right)) for all, one in zip(pieces, asked, strict=True)]
    return RealCase(pieces[0][:-1], questions)


def _said(dialogue: Dialogue, turns: list[Turn]) -> list[tuple[str, str]]:
    """Each message is a piece."""
    functions = "\n".join(dialogue.functions.values())
    said = [("system", f"You act by calling these functions:\n{functions}{CUT}")]
    for turn in turns:
        said += [("user", turn.user + CUT), ("assistant", turn.calls + CUT), ("tool", turn.result + CUT)]
    return said
