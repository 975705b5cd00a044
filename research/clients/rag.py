"""What the RAG applications share: their texts and questions, vectors to retrieve by, and how they are asked."""

import argparse
import json
import random
import re
import time
import zlib
from collections.abc import Callable
from itertools import islice
from math import sqrt
from typing import NamedTuple

from benchmarks.quality.people import TextQuestion, people

TEXTS, ANSWER_TOKENS = 12, 16
DIMENSIONS = 4096


class Reply(NamedTuple):
    text: str
    prompt_tokens: int
    reused_tokens: int
    """The reused tokens that the framework shows."""


Application = Callable[[str], Reply]
"""Answers a question."""


def library() -> tuple[list[str], list[TextQuestion]]:
    """Biographies, and four questions about each in chance order."""
    rng = random.Random("clients")
    persons = [*islice(people(rng), TEXTS)]
    questions = [question for person in persons for question in person.questions]
    rng.shuffle(questions)
    return [person.text for person in persons], questions


def vector(text: str) -> list[float]:
    """A text as the set of its longer words, in place of a model of embeddings, which would be a download."""
    places = {zlib.crc32(word.encode()) % DIMENSIONS for word in re.findall(r"\w{4,}", text.lower())}
    length = 1 / sqrt(len(places) or 1)
    return [length if place in places else 0.0 for place in range(DIMENSIONS)]


def main(application: Callable[[str, str, list[str]], Application]) -> None:
    """Ask applications, one for each server, the same questions in turn; a line of JSON for each question.

    ``application``: makes one, given a server's address, the model's name, and the texts.
    """
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--questions", type=int, required=True)
    arguments.add_argument("servers", nargs="+")
    options = arguments.parse_args()
    texts, questions = library()
    applications = [application(f"{server}/v1", options.model, texts) for server in options.servers]
    for question in questions[: options.questions]:
        answers = []
        for answer in applications:
            begun = time.perf_counter()
            try:
                reply, error = answer(question.question), ""
            except Exception as raised:
                reply, error = Reply("", 0, 0), repr(raised)
            is_right = question.right.strip() in reply.text
            seconds = time.perf_counter() - begun
            answers.append({"seconds": seconds, "is_right": is_right, "error": error, **reply._asdict()})
        print(json.dumps({"question": question.question, "answers": answers}), flush=True)
