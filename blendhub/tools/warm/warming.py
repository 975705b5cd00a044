"""Computes each document of a corpus in its contexts, but for those that the hub has."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from blendhub.core.errors import BlendHubError, InvalidInput
from blendhub.tools.analysis.lines import BrokenLines
from blendhub.tools.warm.documents import Document
from blendhub.tools.warm.neighbours import neighbours, paths
from blendhub.tools.warm.pace import Pace, done_at_pace
from blendhub.tools.warm.prompts import Part, Prompts
from blendhub.tools.warm.server import BUSY_PAUSE_S, Completion, Server, ServerGone
from blendhub.tools.warm.stored import Stored

EXACT = {"mode": "exact"}
"""What is computed for the hub stands behind nothing blended."""
ASKED_AGAIN = EXACT | {"store": False}
SAMPLE = 16
"""Contexts that are asked for again where the hub itself cannot be asked: the first ones, which are evicted first."""
STORED_WITHIN_S = 5.0
"""KV is stored a moment after the answer: the wait, as long as more and more is found."""
ROUNDED = 1
"""Tokens of a prompt that may be missing from what is stored of it: its last one is always computed."""


class Stopped(Exception):
    """A stop came while the server had too much to do."""


class Context(NamedTuple):
    """One prompt to compute, for the part of a document at its end."""

    prompt: list[int]
    part: Part


class Tally(msgspec.Struct):
    """What was done."""

    computed: int = 0
    """Contexts."""
    computed_tokens: int = 0
    warm: int = 0
    """Contexts that were stored already."""
    long: int = 0
    """Documents that are too long for two of them in a prompt."""
    failed: BrokenLines = msgspec.field(default_factory=BrokenLines)


class Warming:
    """The work on one corpus."""

    def __init__(
        self,
        documents: Sequence[Document],
        server: Server,
        prompts: Prompts,
        *,
        stored: Stored | None = None,
        salt: str = "",
        pace: Pace | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """``stored``: None if the hub cannot be asked; then every context is asked of the server."""
        self.tally = Tally()
        self.parts: list[list[Part]] = [[] for _ in documents]
        """The parts of each document; none before it was computed, and none if it cannot be."""
        self._documents = documents
        self._server = server
        self._prompts = prompts
        self._stored = stored
        self._salt = salt
        self._pace = pace or Pace()
        self._stop = stop or threading.Event()
        self._counting = threading.Lock()

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    def run(self, contexts: int = 2, advance: Callable[[], object] = lambda: None) -> None:
        """Compute all documents; ``advance`` is called once for each document and context. Ends early if stopped.

        What stands before a document in a prompt has been computed there before.
        """
        for _ in done_at_pace(range(len(self._documents)), self._compute_alone, self._pace, self._stop):
            advance()
        if contexts > 1 and not self.is_stopped:
            in_order = sorted(range(len(self._nodes)), key=lambda number: len(self._paths[number]))
            for _, numbers in groupby(in_order, key=lambda number: len(self._paths[number])):
                for _ in done_at_pace(numbers, self._compute_behind, self._pace, self._stop):
                    advance()

    def missing(self, contexts: int = 2) -> tuple[int, int]:
        """How many contexts are not stored now, and of how many that were looked at."""
        all_contexts = [(number, behind) for behind in range(contexts) for number in range(len(self._nodes))]
        if self._stored is None:
            all_contexts = all_contexts[:SAMPLE]
        left, since = all_contexts, time.monotonic()
        while left and time.monotonic() < since + STORED_WITHIN_S and not self.is_stopped:
            lacking = [one for one in left if (context := self._context(*one)) and not self._is_stored(context)]
            if len(lacking) < len(left):
                since = time.monotonic()
            left = lacking
            if left:
                time.sleep(BUSY_PAUSE_S / 4)
        return len(left), len(all_contexts)

    def complete(self, prompt: Sequence[int], asked: dict[str, Any]) -> Completion:
        """Ask the server; slower if it has too much to do."""
        return self._server.complete(prompt, asked, self._salt, self._wait)

    def _wait(self) -> None:
        if self.is_stopped:
            raise Stopped
        self._pace.refused()
        time.sleep(BUSY_PAUSE_S)

    @functools.cached_property
    def _nodes(self) -> list[Part]:
        """The parts of all documents, when these have been computed alone."""
        return [part for parts in self.parts for part in parts]

    @functools.cached_property
    def _paths(self) -> list[list[int]]:
        """What stands before each part in its second context: of a long document, its parts before."""
        first, n = [], 0
        for parts in self.parts:
            first.append(n if parts else None)
            n += len(parts)
        parents: list[int | None] = []
        for neighbour, parts in zip(neighbours(self._documents), self.parts, strict=True):
            for part in range(len(parts)):
                parents.append(len(parents) - 1 if part else None if neighbour is None else first[neighbour])
        nodes = self._nodes
        return paths(parents, lambda path, one: self._prompts.has_room([nodes[each] for each in path], nodes[one]))

    def _context(self, number: int, behind: int) -> Context | None:
        """A part in its first context, or in its second one ``behind`` others; None if it has no other."""
        part, path = self._nodes[number], self._paths[number] if behind else []
        if not behind:
            return Context(self._prompts.alone(part), part)
        return Context(self._prompts.behind([self._nodes[one] for one in path], part), part) if path else None

    def _compute_alone(self, number: int) -> None:
        document = self._documents[number]
        with self._noting(document):
            parts = self._prompts.parts_of(document)
            with self._counting:
                self.tally.long += len(parts) > 1
            for part in parts:
                self._compute(Context(self._prompts.alone(part), part))
            self.parts[number] = parts

    def _compute_behind(self, number: int) -> None:
        context = self._context(number, 1)
        if context:
            with self._noting(None):
                self._compute(context)

    def _compute(self, context: Context) -> None:
        computed_tokens, is_warm = 0, self._stored is not None and self._is_stored(context)
        if not is_warm:
            answer = self.complete(context.prompt, EXACT)
            self._pace.computed(answer.computed_tokens)
            computed_tokens, is_warm = answer.computed_tokens, not _is_computed(answer, context)
        with self._counting:
            self.tally.computed_tokens += computed_tokens
            self.tally.computed += not is_warm
            self.tally.warm += is_warm

    def _is_stored(self, context: Context) -> bool:
        if self._stored is None:
            return not _is_computed(self.complete(context.prompt, ASKED_AGAIN), context)
        with contextlib.suppress(BlendHubError):
            return self._stored.lacks(context.prompt) <= ROUNDED
        return False  # a hub that does not answer: the server tells what it has reused

    @contextlib.contextmanager
    def _noting(self, document: Document | None) -> Iterator[None]:
        """Note a document that the server refuses, and go on without it. After an error of the server, stop."""
        try:
            yield
        except InvalidInput as error:
            if document is None:
                raise
            with self._counting:
                self.tally.failed.note(document.place, str(error))
        except Stopped:
            pass
        except ServerGone as error:
            self._stop.set()
            raise ServerGone(
                f"{error}; {self.tally.computed:,} contexts are computed: start the server, and repeat the command, "
                "which computes only what its hub does not have"
            ) from None
        except BaseException:
            self._stop.set()
            raise


def _is_computed(answer: Completion, context: Context) -> bool:
    """Whether the server computed the part itself. Of a stored one it computes only the rest of a block at its end."""
    return answer.computed_tokens > len(context.part.tokens) // 2
