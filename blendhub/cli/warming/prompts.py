"""The documents of a corpus, and the prompts in which they are computed: alone, and in the company of others."""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from blendhub.cli.warming.server import Prompt, Server
from blendhub.core.errors import InvalidInput, reason_of

TEXTS = (".txt", ".text", ".md", ".markdown")
STANDARD_INPUT = "-"
BETWEEN = "\n\n"
SPARE_TOKENS = 16
"""Room for an answer, and for the tokens that texts have more where they are joined."""

COMPANY_TOKENS = 1024
"""The most tokens before a document in company: more would cost loads, and changes its KV little."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Document(msgspec.Struct, frozen=True):
    """A text, or a conversation."""

    text: str = ""
    messages: tuple[Message, ...] = ()


class Corpus(msgspec.Struct):
    documents: dict[Document, str] = {}
    """Each document once, and its place."""
    left_out: list[str] = []
    """For each document that cannot be computed, its place and the reason."""

    def add(self, place: str, document: Document) -> None:
        if document.text.strip() or document.messages:
            self.documents.setdefault(document, place)
        else:
            self.left_out.append(f"{place} has neither a text nor messages")


def read_corpus(path: str) -> Corpus:
    """All documents of a file of JSON lines, a text, or a folder of texts; raises InvalidInput if there are none."""
    corpus = Corpus()
    try:
        if Path(path).is_dir() or Path(path).suffix.lower() in TEXTS:
            for file in sorted(Path(path).rglob("*")) or [Path(path)]:
                if file.suffix.lower() in TEXTS:
                    corpus.add(str(file), Document(file.read_text(encoding="utf-8")))
        else:
            for place, line in _lines(path):
                try:
                    corpus.add(place, msgspec.json.decode(line, type=Document))
                except (msgspec.DecodeError, msgspec.ValidationError) as error:
                    corpus.left_out.append(f"{place} is no document: {error}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {reason_of(error)}") from None
    if not corpus.documents:
        first = f"; the first one: {corpus.left_out[0]}" if corpus.left_out else ""
        raise InvalidInput(f"{path} has no documents; expected JSON lines with 'text' or 'messages', or texts{first}")
    return corpus


def _lines(path: str) -> Iterator[tuple[str, str]]:
    with sys.stdin if path == STANDARD_INPUT else Path(path).open(encoding="utf-8") as lines:
        yield from ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())


class Context(NamedTuple):
    """A prompt to compute."""

    prompt: Prompt
    text: str
    """The document at its end that it is computed for; empty for a conversation."""
    tokens: int
    """The number of the document's tokens."""


class Contexts:
    """Makes prompts as a server reads them: in its model's chat template, if it has one."""

    def __init__(self, server: Server, system: str) -> None:
        self._server = server
        self._system = system
        self._has_template = True
        try:
            frame = server.count(self._prompt("x"))
        except InvalidInput:
            self._has_template = False
            frame = server.count(self._prompt("x"))
        self._most = (server.longest - frame - SPARE_TOKENS) // 2
        """The most tokens of a document: a prompt holds two."""

    def alone(self, document: Document) -> Context:
        """A document behind the system text, or a conversation as it is; raises InvalidInput if it is too long."""
        if document.messages:
            messages = [msgspec.to_builtins(message) for message in document.messages]
            if self._system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": self._system})
            return Context(messages, "", self._server.count(messages))
        tokens = self._server.count(document.text)
        if tokens > self._most:
            raise InvalidInput(
                f"it has {tokens:,} tokens, and only documents of at most {self._most:,} fit twice into a prompt: "
                "split it, or start vLLM with a larger --max-model-len"
            )
        return Context(self._prompt(document.text), document.text, tokens)

    def in_company(self, alone: Sequence[Context]) -> Iterator[list[Context]]:
        """Each document behind others that are drawn by chance. What the contexts of one list begin with is computed
        by the lists before, so that only the documents themselves are new.

        Documents that are added change the context of no other.
        """
        paths: list[list[int]] = [[]]
        for number in range(1, len(alone)):
            drawn = random.Random(alone[number].text).randrange(number)
            longer = [*paths[drawn], drawn]
            fits = sum(alone[other].tokens for other in longer) <= min(COMPANY_TOKENS, self._most)
            paths.append(longer if fits else [drawn])
        paths[0] = [1] if len(alone) > 1 else []
        for length in sorted({len(path) for path in paths} - {0}):
            level = [(path, alone[number]) for number, path in enumerate(paths) if len(path) == length]
            yield [
                context._replace(prompt=self._prompt(BETWEEN.join([*(alone[n].text for n in path), context.text])))
                for path, context in level
            ]

    def _prompt(self, content: str) -> Prompt:
        if not self._has_template:
            return BETWEEN.join(filter(None, (self._system, content)))
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": content}]
