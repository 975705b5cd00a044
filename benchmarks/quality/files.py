"""Files of questions to several documents, in the shapes that are published: a JSON list, or a line each."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

SHAPES = """\
  Musique: {"question", "answer", "answer_aliases", "paragraphs": [{"title", "paragraph_text"}, ...]}
  2WikiMQA, HotpotQA: {"question", "answer", "context": [[TITLE, [SENTENCE, ...]], ...]}
  plain: {"question", "answers": [...] or "answer", "documents": [TEXT or {"title", "text"}, ...]}"""


class Example(msgspec.Struct, frozen=True):
    question: str
    answers: list[str]
    """Any of them is right."""
    documents: list[str]


def read_examples(file: Path) -> list[Example]:
    """Raises ValueError for an entry of no known shape, and names it."""
    text = file.read_text(encoding="utf-8")
    entries = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x]
    examples = []
    for number, entry in enumerate(entries):
        try:
            examples.append(Example(str(entry["question"]), _answers(entry), _documents(entry)))
        except (KeyError, TypeError, ValueError) as error:
            keys = ", ".join(entry) if isinstance(entry, Mapping) else type(entry).__name__
            raise ValueError(
                f"{file}: entry {number} has the keys {keys}, which is none of these shapes ({error!r}):\n{SHAPES}"
            ) from None
    if not examples:
        raise ValueError(f"{file} has no entries")
    return examples


def _answers(entry: Mapping[str, Any]) -> list[str]:
    given = entry["answers"] if "answers" in entry else [entry["answer"], *(entry.get("answer_aliases") or [])]
    answers = [str(one) for one in ([given] if isinstance(given, str) else given)]
    if not answers:
        raise ValueError("no answers")
    return answers


def _documents(entry: Mapping[str, Any]) -> list[str]:
    if "paragraphs" in entry:
        documents = [_titled(one["title"], one["paragraph_text"]) for one in entry["paragraphs"]]
    elif "context" in entry:
        context = entry["context"]
        pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, Mapping) else context
        documents = [_titled(title, " ".join(sentence.strip() for sentence in sentences)) for title, sentences in pairs]
    else:
        given = entry["documents"] if "documents" in entry else entry["ctxs"]
        documents = [one if isinstance(one, str) else _titled(one.get("title", ""), one["text"]) for one in given]
    if not documents:
        raise ValueError("no documents")
    return documents


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text}" if title else text
