"""Reads logs, makes tokens of them and plays these, until the end or until the user interrupts."""

import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from blendhub.tools.analysis.analyzer import Analyzer
from blendhub.tools.analysis.broken import BrokenLine
from blendhub.tools.analysis.logs import Logs
from blendhub.tools.analysis.requests import Prompt
from blendhub.tools.analysis.tokenizing import Encoder

BATCH = 256
BATCH_BYTES = 2**22
"""Prompts, and bytes of them, that are tokenised together."""

NEVER = 2**31 - 1
YOUNG_OBJECTS = 50_000
"""So many are made before the next collection: about those of a hundred prompts, which leave hardly any cycles."""

Progress = Callable[[], object]


class Interruption:
    """Ctrl-C ends the reading of logs, wherever it waits, and takes effect after a prompt while one is played.

    A second Ctrl-C ends the process.
    """

    def __init__(self) -> None:
        self.happened = False
        self._may_raise = False

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        former = signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    def while_waiting(self, work: Callable[[], Any]) -> Any:
        """The result of reading; None if that was interrupted."""
        try:
            self._may_raise = True
            return None if self.happened else work()
        except KeyboardInterrupt:
            return None
        finally:
            self._may_raise = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.happened = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._may_raise:
            raise KeyboardInterrupt


def play(
    logs: Logs, encoder: Encoder, analyzer: Analyzer, interruption: Interruption, progress: Progress
) -> dict[str, float]:
    """Play all prompts of the logs; returns how many seconds each part of the work took."""
    seconds = dict.fromkeys(("reading", "tokenising", "playing"), 0.0)
    batches = _batches(logs)
    clock = time.perf_counter
    with few_collections():
        while True:
            begun = clock()
            batch = interruption.while_waiting(lambda: next(batches, None))
            read = clock()
            seconds["reading"] += read - begun
            if batch is None:
                return seconds
            encoded = encoder.encode(batch)
            tokenised = clock()
            seconds["tokenising"] += tokenised - read
            for prompt, tokens in zip(batch, encoded, strict=True):
                if isinstance(tokens, BrokenLine):
                    logs.broken.note(prompt.place, str(tokens))
                else:
                    analyzer.add(prompt, tokens)
                if interruption.happened:
                    break
            seconds["playing"] += clock() - tokenised
            progress()


def _batches(logs: Logs) -> Iterator[list[Prompt]]:
    batch: list[Prompt] = []
    size = 0
    for prompt in logs:
        batch.append(prompt)
        size += prompt.size
        if len(batch) >= BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """A full collection looks at each chunk that is in the index, and others at what was made for one prompt."""
    former = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, former[1], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*former)
        gc.unfreeze()
