"""Files of questions to several documents, in the shapes that are published; and the prompts made of them."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from blendhub.core.errors import InvalidInput, reason_of

Text = str | list[Annotated[int, Meta(ge=0, lt=2**32)]]
"""A text, or its token ids."""

SHAPES = """\
  plain: {"question": TEXT, "documents": [TEXT or {"title", "text"}, ...], and maybe "answer" or "answers"}
  Musique: {"question", "answer", "answer_aliases", "paragraphs": [{"title", "paragraph_text"}, ...]}
  2WikiMQA, HotpotQA: {"question", "answer", "context": [[TITLE, [SENTENCE, ...]], ...]}"""

EXPECTED = "it should have entries like {'question': TEXT, 'documents': [TEXT, ...]}, or of a shape that --help shows"


class Question(msgspec.Struct, frozen=True):
    """A prompt: its documents in their order, and what follows them."""

    documents: Annotated[list[Text], Meta(min_length=1)]
    question: Text
    answers: list[str] = []
    """The right answers, any of which is accepted; empty if the file names none."""


def read_questions(file: Path, most: int | None = None) -> list[Question]:
    """The first questions of a file; raises InvalidInput, naming the entry that has none of the shapes."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {file}: {reason_of(error)}; {EXPECTED}") from None
    questions = [_question(place, entry) for place, entry in islice(_entries(file, text), most)]
    if not questions:
        raise InvalidInput(f"{file} has no questions; {EXPECTED}")
    unanswered = [number for number, question in enumerate(questions, 1) if not question.answers]
    if 0 < len(unanswered) < len(questions):
        raise InvalidInput(
            f"{file}: {len(unanswered)} of {len(questions)} questions have no answer, the first is question "
            f"{unanswered[0]}; give each an answer, or none"
        )
    return questions


def _entries(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each entry, with its place."""
    place = str(file)
    try:
        if text.lstrip().startswith("["):
            for number, entry in enumerate(json.loads(text), 1):
                yield f"{file}, entry {number}", entry
            return
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                place = f"{file}, line {number}"
                yield place, json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{place} is not JSON: {error}; {EXPECTED}") from None


def _question(place: str, entry: Any) -> Question:
    try:
        question = {"documents": _documents(entry), "question": entry["question"], "answers": _answers(entry)}
        return msgspec.convert(question, Question)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        mistake = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        keys = ", ".join(entry) if isinstance(entry, Mapping) else type(entry).__name__
        raise InvalidInput(f"{place} has the keys {keys}, which is no question ({mistake}); {EXPECTED}") from None


def _answers(entry: Mapping[str, Any]) -> list[str]:
    answers = entry.get("answers")
    if answers is None:
        answers = [*([entry["answer"]] if "answer" in entry else []), *(entry.get("answer_aliases") or [])]
    return [str(answer) for answer in ([answers] if isinstance(answers, str) else answers)]


def _documents(entry: Mapping[str, Any]) -> list[Text]:
    if "paragraphs" in entry:
        return [_titled(part["title"], part["paragraph_text"]) for part in entry["paragraphs"]]
    if "context" in entry:
        return [_titled(title, " ".join(map(str.strip, sentences))) for title, sentences in entry["context"]]
    documents = entry["documents"]
    if not isinstance(documents, list):
        raise TypeError("documents is not a list")
    return [
        _titled(document.get("title", ""), document["text"]) if isinstance(document, Mapping) else document
        for document in documents
    ]


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text}" if title else text


BETWEEN = "\n\n"
"""Ends each document that is given as text."""

CONTENT = "CONTENT"
"""Stands for the user's words while the chat template is rendered."""


class Prompts:
    """Questions as one model reads them: in its chat template, if its tokenizer has one."""

    def __init__(self, tokenizer: Any, questions: Sequence[Question]) -> None:
        """The tokenizer may be None if there are token ids only; these get no template."""
        self._tokenizer = tokenizer
        texts = [text for question in questions for text in (*question.documents, question.question)]
        is_text = any(isinstance(text, str) for text in texts)
        self.has_template = bool(getattr(tokenizer, "chat_template", None)) or not is_text
        """Whether the template's place is filled: token ids stand as they are given."""
        begin, end = self._frame() if is_text else ([], [])
        self.asked = [[*begin, *self._body(question), *end] for question in questions]
        self._begin = begin
        documents = {tuple(self._tokens(text, BETWEEN)) for question in questions for text in question.documents}
        self.documents = sorted(map(list, documents - {()}), key=lambda text: (len(text), text))
        """The longest last."""

    def visits(self, context: int, order: int = 0) -> Iterator[list[int]]:
        """Prompts in which each document stands behind at least so many tokens of others: only then its KV moves.
        ``order``: names one of many orders of the documents."""
        documents = random.Random(order).sample(self.documents, len(self.documents))
        room, at = max(map(len, self.asked)) - len(self._begin), 0
        while at < len(documents):
            before, text = at, list[int]()
            while len(text) < context:
                before -= 1
                text = documents[before % len(documents)] + text
            text = text[len(text) - context :] + documents[at]
            at += 1
            while at < len(documents) and len(text) + len(documents[at]) <= room:
                text += documents[at]
                at += 1
            yield self._begin + text

    def _frame(self) -> tuple[list[int], list[int]]:
        """The tokens that the chat template puts before and behind the words of a user."""
        if self.has_template:
            message = [{"role": "user", "content": CONTENT}]
            chat: str = self._tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            begin, _, end = chat.partition(CONTENT)
            return self._tokens(begin), self._tokens(end)
        first = getattr(self._tokenizer, "bos_token_id", None)
        return [first] if first is not None and first in self._tokenizer.encode("a") else [], []

    def _body(self, question: Question) -> Iterator[int]:
        for document in question.documents:
            yield from self._tokens(document, BETWEEN)
        yield from self._tokens(question.question)

    def _tokens(self, text: Text, behind: str = "") -> list[int]:
        if not isinstance(text, str):
            return text
        tokens: list[int] = self._tokenizer.encode(text + behind, add_special_tokens=False)
        return tokens
