"""Files of questions to several documents, in the shapes that are published: a JSON list, or a line each."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from blendhub.core.errors import InvalidInput

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
        raise InvalidInput(f"cannot read {file}: {error}; {EXPECTED}") from None
    questions = [_question(where, entry) for where, entry in islice(_entries(file, text), most)]
    if not questions:
        raise InvalidInput(f"{file} has no questions; {EXPECTED}")
    return questions


def _entries(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each entry, with its place."""
    if text.lstrip().startswith("["):
        for number, entry in enumerate(_decoded(str(file), text), 1):
            yield f"{file}, entry {number}", entry
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{file}, line {number}", _decoded(f"{file}, line {number}", line)


def _decoded(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{where} is not JSON: {error}; {EXPECTED}") from None


def _question(where: str, entry: Any) -> Question:
    try:
        found = {"documents": _documents(entry), "question": entry["question"], "answers": _answers(entry)}
        return msgspec.convert(found, Question)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        keys = ", ".join(entry) if isinstance(entry, Mapping) else type(entry).__name__
        raise InvalidInput(f"{where} has the keys {keys}, which is no question ({said}); {EXPECTED}") from None


def _answers(entry: Mapping[str, Any]) -> list[str]:
    given = entry.get("answers")
    if given is None:
        given = [*([entry["answer"]] if "answer" in entry else []), *(entry.get("answer_aliases") or [])]
    return [str(one) for one in ([given] if isinstance(given, str) else given)]


def _documents(entry: Mapping[str, Any]) -> list[Text]:
    if "paragraphs" in entry:
        return [_titled(one["title"], one["paragraph_text"]) for one in entry["paragraphs"]]
    if "context" in entry:
        context = entry["context"]
        pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
        return [_titled(title, " ".join(sentence.strip() for sentence in sentences)) for title, sentences in pairs]
    given = entry["documents"] if "documents" in entry else entry["ctxs"]
    if not isinstance(given, list):
        raise TypeError("documents is not a list")
    return [_titled(one.get("title", ""), one["text"]) if isinstance(one, Mapping) else one for one in given]


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text}" if title else text
