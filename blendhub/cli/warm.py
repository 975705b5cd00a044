"""``blendhub warm``: computes a corpus before users ask about it."""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from blendhub.cli.warming.contexts import Context, Contexts
from blendhub.cli.warming.documents import Corpus, Document, read_corpus
from blendhub.cli.warming.server import Server, ServerGone
from blendhub.core.errors import InvalidInput, OptionError, reason_of

J = TypeVar("J")
R = TypeVar("R")
WARNING, INTERRUPTED = 3, 130
SAID_EVERY_S = 30.0
SAMPLE = 16
"""Contexts that are asked for again at the end: the first ones, which are evicted first."""

STORED_WITHIN_S = 5.0
"""KV is stored a moment after the answer."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "warm",
        help="compute a corpus before users ask about it",
        description="Have a server compute every document of a corpus and store its KV, alone and in the company of "
        "others, so that the first question to it is answered from stored KV. Started again, the command computes only "
        "what is not stored. Exits with 3 if some documents could not be computed or did not fit.",
    )
    add = parser.add_argument
    add("--server", required=True, metavar="URL", help="vLLM's server with BlendHub, such as http://localhost:8000")
    add("--data", required=True, metavar="PATH", help="a file of JSON lines, a CSV file, a folder of texts, or -")
    add("--column", default="text", metavar="NAME", help="of a CSV file: has the documents (default text)")
    add("--system", type=Path, metavar="FILE", help="the system text before the documents of your service")
    add("--contexts", type=int, choices=(1, 2), default=2, help="of each document; 1: alone (default 2)")
    add("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default 8)")
    add("--cache-salt", default="", metavar="SALT", help="the salt of the requests that will ask")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.concurrency < 1:
        raise OptionError(f"--concurrency {arguments.concurrency} should be at least 1")
    corpus = read_corpus(arguments.data, arguments.column)
    server = Server(arguments.server, os.environ.get("VLLM_API_KEY", ""), arguments.cache_salt)
    warming = Warming(server, Contexts(server, _system(arguments.system)), arguments.concurrency)
    try:
        warming.compute(corpus, arguments.contexts)
    except KeyboardInterrupt:
        print("Stopped: the same command goes on from here.", flush=True)
        return INTERRUPTED
    except ServerGone as error:
        raise ServerGone(f"{error}; start it, and repeat the command, which computes only what is not stored") from None
    print(
        f"{len(corpus.documents):,} documents: {warming.computed:,} contexts are computed, {warming.tokens:,} tokens; "
        f"{warming.stored:,} contexts were stored."
    )
    if corpus.copies:
        print(f"{corpus.copies:,} more documents have the text of another one.")
    if corpus.left_out:
        print(f"{len(corpus.left_out):,} documents are left out; the first one: {corpus.left_out[0]}")
    missing = warming.missing()
    if missing:
        print(
            f"{missing} of the first {len(warming.first)} contexts are not stored any more: not all fits. "
            "hub.arena_gib enlarges the arena; hub.store keeps what it evicts."
        )
    return WARNING if missing or corpus.left_out else 0


class Warming:
    """The work on one corpus, so many requests at a time."""

    def __init__(self, server: Server, contexts: Contexts, concurrency: int) -> None:
        self.computed = self.tokens = self.stored = 0
        """Contexts that were computed, their tokens, and contexts that were stored already."""
        self.first: list[Context] = []
        self._server = server
        self._contexts = contexts
        self._concurrency = concurrency
        self._counting = threading.Lock()

    def compute(self, corpus: Corpus, contexts: int) -> None:
        """Compute all documents; those that the server refuses are noted in the corpus."""
        parts: list[list[int]] = []
        progress = Progress("documents", len(corpus.documents))
        done = self._in_parallel(self._compute_alone, corpus.documents, progress)
        for place, result in zip(corpus.documents.values(), done, strict=True):
            if isinstance(result, InvalidInput):
                corpus.left_out.append(f"{place}: {result}")
            else:
                parts += result
        if contexts > 1:
            progress = Progress("second contexts", len(parts))
            for level in self._contexts.in_company(parts):
                list(self._in_parallel(self._compute, level, progress))

    def missing(self) -> int:
        """How many of the first contexts are not stored now."""
        left, until = self.first, time.monotonic() + STORED_WITHIN_S
        while True:
            left = [context for context in left if self._server.compute(context.prompt, store=False) > context.new // 2]
            if not left or time.monotonic() > until:
                return len(left)
            time.sleep(0.2)

    def _compute_alone(self, document: Document) -> list[list[int]] | InvalidInput:
        """The parts of a document, which may stand behind others, or why the server refuses it."""
        try:
            if document.messages:
                self._compute(self._contexts.conversation(document))
                return []
            parts = self._contexts.parts_of(document)
            for part in parts:
                self._compute(self._contexts.alone(part))
        except InvalidInput as error:
            return error
        return parts

    def _compute(self, context: Context) -> None:
        computed = self._server.compute(context.prompt)
        with self._counting:
            # Of stored tokens, the server computes only the rest of a block at the end.
            is_new = computed > context.new // 2
            self.computed += is_new
            self.stored += not is_new
            self.tokens += computed if is_new else 0
            if len(self.first) < SAMPLE:
                self.first.append(context)

    def _in_parallel(self, do: Callable[[J], R], jobs: Iterable[J], progress: "Progress") -> Iterator[R]:
        """The results in order. After an error, or Ctrl-C, no further job begins; those that run end."""
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="blendhub-warm")
        try:
            for result in pool.map(do, jobs):
                progress.advance()
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


class Progress:
    """Says on standard error, from time to time, how much is done and how long the rest takes."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._begun = self._said = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        now = time.monotonic()
        if now > self._said + SAID_EVERY_S:
            left = (now - self._begun) * (self._total - self._done) / self._done
            print(f"{self._done:,} of {self._total:,} {self._what}, {left / 60:.0f} min left", file=sys.stderr)
            self._said = now


def _system(file: Path | None) -> str:
    try:
        return file.read_text(encoding="utf-8").strip("\n") if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--system {file} cannot be read: {reason_of(error)}") from None
