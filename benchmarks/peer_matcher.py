"""The peer's matcher behind a pipe: started with the peer's interpreter, it runs commands and times them.

Commands come as lines of JSON, answers go back likewise; token arrays travel as ``.npy`` files. Needs only numpy and
the peer, nothing of BlendHub.
"""

import hashlib
import json
import logging
import os
import sys
import time
from typing import Any

import numpy as np

CHUNK = 256


class Peer:
    """One matcher at a time. Conversions to the lists that its API takes are not timed."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        from lmcache.v1.multiprocess.modules.blend.matcher import BlendTokenRangeMatcher

        self._make = BlendTokenRangeMatcher
        self.reset()
        # Compiles its kernels, as its own server does at the start.
        self._matcher.match_sub_sequence([0] * CHUNK)
        self._matcher.on_new_token_hashes([0] * CHUNK, [b"warm"])
        self.reset()

    def reset(self) -> None:
        self._matcher = self._make(CHUNK)

    def add(self, path: str) -> float:
        """Store each row of an array; returns the seconds."""
        seconds = 0.0
        for number, row in enumerate(np.load(path)):
            tokens, names = row.tolist(), _names(number, len(row))
            start = time.perf_counter()
            self._matcher.on_new_token_hashes(tokens, names)
            seconds += time.perf_counter() - start
        return seconds

    def discard(self, rows: int, length: int) -> float:
        """Forget what ``add`` stored, a row at a time."""
        seconds = 0.0
        for number in range(rows):
            names = _names(number, length)
            start = time.perf_counter()
            self._matcher.remove_chunks(names)
            seconds += time.perf_counter() - start
        return seconds

    def match(self, path: str) -> float:
        tokens = np.load(path).tolist()
        start = time.perf_counter()
        self._matcher.match_sub_sequence(tokens)
        return time.perf_counter() - start

    def covered(self, path: str) -> list[list[int]]:
        """The ranges of a prompt that the peer finds."""
        return [[found.cur_st, found.cur_ed] for found in self._matcher.match_sub_sequence(np.load(path).tolist())]

    def store_texts(self, path: str, lengths: list[int]) -> None:
        """Store sequences of different lengths that stand one after the other in a file."""
        tokens = np.load(path)
        at = 0
        for number, length in enumerate(lengths):
            self._matcher.on_new_token_hashes(tokens[at : at + length].tolist(), _names(number, length))
            at += length


def _names(sequence: int, length: int) -> list[bytes]:
    return [hashlib.blake2b(b"%d:%d" % (sequence, chunk), digest_size=16).digest() for chunk in range(length // CHUNK)]


def main() -> None:
    os.sched_setaffinity(0, {int(sys.argv[1])})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the peer prints must not end up among the answers
    peer = Peer()
    for line in sys.stdin:
        command: list[Any] = json.loads(line)
        answers.write(json.dumps(getattr(peer, command[0])(*command[1:])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
