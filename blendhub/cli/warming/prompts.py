"""The documents of a corpus, and the prompts in which they are computed: each in the company of others."""

import random
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
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

MAX_COMPANIES = 8
"""Companies are computed for this alone; all documents behind a single one would all lean on its texts."""


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
    tokens: int
    """The number of tokens that nothing else computes: those of the text at the end, or of a conversation."""
    text: str = ""
    """The text at the end; empty for a conversation."""
    before: int = 0
    """The least number of tokens before the text."""


class Contexts:
    """Makes prompts as a server reads them: in its model's chat template, if it has one."""

    def __init__(self, server: Server, system: str, least: int) -> None:
        """``least``: the tokens that should stand before a document."""
        self.least = least
        self._server = server
        self._system = system
        self._system_tokens = server.count(system) if system else 0
        self._has_template = True
        try:
            frame = server.count(self._prompt("x"))
        except InvalidInput:
            self._has_template = False
            frame = server.count(self._prompt("x"))
        self._most = (server.longest - frame - SPARE_TOKENS - least) // 2
        """The most tokens of a document: a prompt holds one behind others, of which the last one may be as long."""

    def alone(self, document: Document) -> Context:
        """A document behind the system text, or a conversation as it is; raises InvalidInput if it is too long."""
        if document.messages:
            messages = [msgspec.to_builtins(message) for message in document.messages]
            if self._system and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": self._system})
            return Context(messages, self._server.count(messages))
        tokens = self._server.count(document.text)
        if tokens > self._most:
            raise InvalidInput(
                f"it has {tokens:,} tokens; behind others only documents of at most {self._most:,} fit into a prompt: "
                "split it, or start vLLM with a larger --max-model-len"
            )
        return Context(self._prompt(document.text), tokens, document.text, self._system_tokens)

    def in_company(self, alone: Sequence[Context]) -> tuple[list[Context], list[Context]]:
        """The companies of documents, and each document behind one of these, which is to be computed before it."""
        companies = companies_of([context.tokens for context in alone], self.least)
        contexts = [self._behind(company, context, alone) for company, context in zip(companies, alone, strict=True)]
        together = [
            self._behind(company[:-1], alone[company[-1]], alone)._replace(tokens=sum(alone[n].tokens for n in company))
            for company in dict.fromkeys(companies)
            if company
        ]
        return together, contexts

    def in_other_company(self, alone: Sequence[Context]) -> Iterator[Context]:
        """Each document directly behind another one than before."""
        companies = companies_of([context.tokens for context in alone], self.least)
        n = len(alone)
        others = [
            company[::-1] if len(company) > 1 else tuple({(number + step) % n for step in (1, 2)} - {number, *company})
            for number, company in enumerate(companies)
        ]
        return (
            self._behind(company, context, alone) for company, context in zip(others, alone, strict=True) if company
        )

    def _behind(self, company: Sequence[int], context: Context, alone: Sequence[Context]) -> Context:
        texts = [alone[number].text for number in company]
        before = context.before + sum(alone[number].tokens for number in company)
        return context._replace(prompt=self._prompt(BETWEEN.join([*texts, context.text])), before=before)

    def _prompt(self, content: str) -> Prompt:
        if not self._has_template:
            return BETWEEN.join(filter(None, (self._system, content)))
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": content}]


def companies_of(lengths: Sequence[int], least: int) -> list[tuple[int, ...]]:
    """For each document, some that follow each other, with at least so many tokens or all that there are.

    Documents that are added change the company of no other, unless it was too small.
    """
    starts, numbers_of_starts, tokens = [0], [], 0
    for number, length in enumerate(lengths):
        if tokens >= least > 0:
            starts.append(number)
            tokens = 0
        tokens += length
        numbers_of_starts.append(len(starts))
    companies = []
    for number, n_starts in enumerate(numbers_of_starts):
        # What begins at an earlier start ends before the document.
        earlier = min(n_starts - 1, MAX_COMPANIES)
        start = starts[random.Random(number).randrange(earlier)] if earlier else starts[:2][-1]
        company: list[int] = []
        for other in chain(range(start, len(lengths)), range(start)):
            if sum(lengths[n] for n in company) >= least:
                break
            if other != number:
                company.append(other)
        companies.append(tuple(company))
    return companies
