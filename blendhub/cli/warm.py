"""``blendhub warm``: computes a corpus before users ask about it."""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from blendhub.cli.warming.prompts import Context, Contexts, Corpus, Document, read_corpus
from blendhub.cli.warming.server import Server
from blendhub.core.errors import InvalidInput, OptionError, reason_of
from blendhub.core.layout import MIN_DONOR_CONTEXT

J = TypeVar("J")
R = TypeVar("R")
WARNING, INTERRUPTED = 3, 130
TOLD_EVERY_S = 30.0
SAMPLE = 16
"""Contexts that are asked for again at the end: the first ones, which are evicted first."""

STORED_WITHIN_S = 5.0
"""KV is stored a moment after the answer."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "warm",
        help="compute a corpus before users ask about it",
        description="Have a server compute every document of a corpus behind others and store its KV, for the first "
        "question to move. Started again, the command computes only what is not stored. Exits with 3 if some documents "
        "could not be computed, have too little text before them, or did not fit.",
    )
    add = parser.add_argument
    add("--server", required=True, metavar="URL", help="vLLM's server with BlendHub, such as http://localhost:8000")
    add("--data", required=True, metavar="PATH", help="a file of JSON lines, a text, a folder of texts, or -")
    add("--system", type=Path, metavar="FILE", help="the system text before the documents of your service")
    add("--concurrency", type=int, default=8, metavar="N", help="requests at a time (default 8)")
    text = f"the server's policy.min_donor_context (default {MIN_DONOR_CONTEXT})"
    add("--min-donor-context", type=int, default=MIN_DONOR_CONTEXT, metavar="N", help=text)
    add("--cache-salt", default="", metavar="SALT", help="the salt of the requests that will ask")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.concurrency < 1:
        raise OptionError(f"--concurrency {arguments.concurrency} should be at least 1")
    if arguments.min_donor_context < 0:
        raise OptionError(f"--min-donor-context {arguments.min_donor_context} should be at least 0")
    try:
        system = arguments.system.read_text(encoding="utf-8").strip("\n") if arguments.system else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--system {arguments.system} cannot be read: {reason_of(error)}") from None
    corpus = read_corpus(arguments.data)
    server = Server(arguments.server, os.environ.get("VLLM_API_KEY", ""), arguments.cache_salt)
    contexts = Contexts(server, system, arguments.min_donor_context)
    warming = Warming(server, contexts, arguments.concurrency)
    try:
        warming.compute(corpus)
    except KeyboardInterrupt:
        print("Stopped: the same command goes on from here.", flush=True)
        return INTERRUPTED
    print(
        f"{len(corpus.documents):,} documents: {warming.computed:,} contexts are computed, {warming.tokens:,} tokens; "
        f"{warming.stored:,} contexts were stored."
    )
    if corpus.left_out:
        print(f"{len(corpus.left_out):,} documents are left out; the first one: {corpus.left_out[0]}")
    if warming.shallow:
        print(
            f"{warming.shallow:,} documents have fewer than {contexts.least} tokens before them, which is all that the "
            "corpus and --system have: prompts reuse them only behind the same text."
        )
    missing = warming.missing()
    if missing:
        print(
            f"{missing} of the first {len(warming.first)} contexts are not stored any more: not all fits. "
            "hub.arena_gib enlarges the arena; hub.store keeps what it evicts."
        )
    return WARNING if missing or warming.shallow or corpus.left_out else 0


class Warming:
    """The work on one corpus, so many requests at a time."""

    def __init__(self, server: Server, contexts: Contexts, concurrency: int) -> None:
        self.computed = self.tokens = self.stored = 0
        """Contexts that were computed, their tokens, and contexts that were stored already."""
        self.shallow = 0
        """Documents with too little text before them to be moved."""
        self.first: list[Context] = []
        self._server = server
        self._contexts = contexts
        self._concurrency = concurrency
        self._counting = threading.Lock()
        self._told = time.monotonic()

    def compute(self, corpus: Corpus) -> None:
        """Compute all documents; those that the server refuses are noted in the corpus."""
        texts: list[Context] = []
        for place, result in zip(corpus.documents.values(), self._each(self._begin, corpus.documents), strict=True):
            if isinstance(result, InvalidInput):
                corpus.left_out.append(f"{place}: {result}")
            elif result.text:
                texts.append(result)
        companies, contexts = self._contexts.in_company(texts)
        self.shallow = sum(context.before < self._contexts.least for context in contexts)
        for level in (companies, contexts):
            list(self._each(self._compute, level))
        self._make_segments(self._contexts.in_other_company(texts))

    def _make_segments(self, contexts: Iterator[Context]) -> None:
        """In models with recurrent layers, text moves that was computed behind two other texts."""
        first = next(contexts, None)
        if first and self._server.needs_segments(first.prompt):
            all_contexts = chain([first], contexts)
            made = self._each(lambda context: self._server.needs_segments(context.prompt, store=True), all_contexts)
            print(f"{sum(made):,} documents became segments, computed behind other text once more", file=sys.stderr)

    def missing(self) -> int:
        """How many of the first contexts are not stored now."""
        left, until = self.first, time.monotonic() + STORED_WITHIN_S
        while True:
            left = [one for one in left if self._server.compute(one.prompt, store=False) > one.tokens // 2]
            if not left or time.monotonic() > until:
                return len(left)
            time.sleep(0.2)

    def _begin(self, document: Document) -> Context | InvalidInput:
        """The document alone, or why the server refuses it; a conversation is computed."""
        try:
            context = self._contexts.alone(document)
            if not context.text:
                self._compute(context)
        except InvalidInput as error:
            return error
        return context

    def _compute(self, context: Context) -> None:
        computed = self._server.compute(context.prompt)
        with self._counting:
            # Of stored tokens, the server computes only the rest of a block at the end.
            is_new = computed > context.tokens // 2
            self.computed += is_new
            self.stored += not is_new
            self.tokens += computed if is_new else 0
            if len(self.first) < SAMPLE:
                self.first.append(context)
            if time.monotonic() > self._told + TOLD_EVERY_S:
                print(f"{self.computed:,} contexts are computed, {self.stored:,} were stored", file=sys.stderr)
                self._told = time.monotonic()

    def _each(self, do: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """The results in order. After an error, or Ctrl-C, no further job begins; those that run end."""
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="blendhub-warm")
        try:
            yield from pool.map(do, jobs)
        finally:
            pool.shutdown(cancel_futures=True)
