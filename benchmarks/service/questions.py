"""The questions that are asked, each behind five of forty documents in chance order, and which answers are right."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

from benchmarks.quality.people import TextQuestion, people
from benchmarks.quality.sources import manual, requests, shuffled
from benchmarks.quality.workloads import Chat, Tokens, about_section, case_of

DOCUMENTS, RETRIEVED, GIVEN_TOKENS = 40, 5, 8
SYSTEM = "You answer questions about the documents."


class Question(NamedTuple):
    kind: str
    prompt: Tokens
    is_right: Callable[[Tokens, str], bool]
    """Takes an answer's tokens and its text, and returns whether the answer is right."""


class Document(NamedTuple):
    kind: str
    text: str
    questions: Sequence[TextQuestion]


def given(chat: Chat, number: int) -> Iterator[Question]:
    """Questions with the beginning of the answer. It goes on with known tokens; of some questions, none are known."""
    rng, documents = random.Random("service questions"), library()
    for _ in range(number):
        retrieved = rng.sample(documents, RETRIEVED)
        document = rng.choice(retrieved)
        case = case_of(chat, SYSTEM, [text for _, text, _ in retrieved], [rng.choice(document.questions)])
        (question,) = case.questions
        right = question.right[:GIVEN_TOKENS]
        yield Question(document.kind, case.body + question.tokens, partial(goes_on, right))


def free(chat: Chat, number: int) -> Iterator[Question]:
    """Questions about biographies. The documents stand in the system's message, and for every second one in the user's.

    No question comes twice before all were asked.
    """
    rng = random.Random("service free")
    persons = [*islice(people(rng), DOCUMENTS)]
    about = [(person, question) for person in persons for question in person.questions]
    for at, (person, question) in enumerate(islice(cycle(shuffled(about, "service free")), number)):
        others = rng.sample([other for other in persons if other is not person], RETRIEVED - 1)
        retrieved = shuffled([person, *others], f"service free {at}")
        documents = "\n\n".join(f"Document: {one.text}" for one in retrieved)
        place = ("system", "user")[at % 2]
        if place == "system":
            messages = [("system", f"{SYSTEM}\n\n{documents}"), ("user", question.question)]
        else:
            messages = [("system", SYSTEM), ("user", f"{documents}\n\n{question.question}")]
        (prompt,) = chat.pieces(messages)
        yield Question(place, prompt, partial(says, question.right.strip(), question.choices.split()))


def goes_on(right: Tokens, tokens: Tokens, text: str) -> bool:
    return bool(right) and tokens[: len(right)] == right


def says(right: str, choices: Sequence[str], tokens: Tokens, text: str) -> bool:
    """Whether the first choice that the text names is the right one, as a reader would see it."""
    known = {choice.casefold() for choice in choices}
    named = (word for word in re.findall(r"\w+", text.casefold()) if word in known)
    return next(named, None) == right.casefold()


def library() -> list[Document]:
    """Half of it are biographies, the others sections of Python's manual and descriptions of functions."""
    rng = random.Random("service")
    lives = [
        Document("life", f"Document: {person.text}\n\n", person.questions)
        for person in islice(people(rng), DOCUMENTS // 2)
    ]
    sections = [
        Document("section", f"Section of {title}:\n\n{section}", about_section(title, section, rng))
        for (title, section) in shuffled([(topic[0].split("\n")[0], topic[0]) for topic in manual()], "service")
    ]
    functions = {
        request.right: Document(
            "function",
            f"Function: {request.functions[request.right]}\n\n",
            [TextQuestion(f"Which function serves this request? {request.text}", 'The function is "', request.right)],
        )
        for request in shuffled(requests(), "service")
    }
    return lives + sections[: DOCUMENTS // 4] + [*functions.values()][: DOCUMENTS // 4]
