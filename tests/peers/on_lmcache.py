"""A plugin of pytest for LMCache's tests of its matcher: BlendHub's ``rolling_hash`` is in the place of theirs."""

import sys
from enum import IntEnum
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import recorder

from blendhub import PluginHost, Span

NO_TOKEN = 2**32 - 1
"""What stands before a sequence of which only the end is stored; no test has it."""


class Matcher:
    """A sequence that is stored is one run, and what is found of it is cut at its chunks."""

    def __init__(self, chunk_size: int = 256, dedup_content: bool = False) -> None:
        recorder.asked()
        self._matcher = PluginHost.discover().create("matcher", "rolling_hash", {})
        self._chunk_size = chunk_size
        self._stores_once = dedup_content
        self._chunks: dict[tuple[int, int], bytes] = {}
        """The hashes of the stored chunks, by run and position."""
        self._n_runs = 0

    def on_new_token_hashes(
        self, token_ids: list[int], token_hashes: list[bytes], start_chunk_idx: int = 0, position_offset: int = 0
    ) -> int:
        n_before, size = len(self._chunks), self._chunk_size
        tokens = np.array([NO_TOKEN] * position_offset + token_ids, np.uint32)
        self._n_runs += 1
        for chunk in range(start_chunk_idx, len(token_ids) // size):
            place = Span(position_offset + chunk * size, position_offset + (chunk + 1) * size)
            if token_hashes[chunk] in self._chunks.values() or (
                self._stores_once and self.match_sub_sequence(tokens[place.start : place.end].tolist())
            ):
                self._n_runs += 1  # a run has no gap
                continue
            self._matcher.add(self._n_runs, tokens, place)
            self._chunks[self._n_runs, place.start] = token_hashes[chunk]
        return len(self._chunks) - n_before

    def match_sub_sequence(self, token_ids: list[int]) -> list[Any]:
        from lmcache.v1.multiprocess.custom_types import CBMatchResult

        size, found = self._chunk_size, []
        for match in self._matcher.match(np.array(token_ids, np.uint32)):
            moved = match.span.start - match.source_start
            for (run, start), token_hash in self._chunks.items():
                if run == match.run and match.span.start <= start + moved <= match.span.end - size:
                    found.append(CBMatchResult(start, start + size, start + moved, start + moved + size, token_hash))
        return found

    def remove_chunks(self, token_hashes: list[bytes]) -> None:
        for (run, start), token_hash in list(self._chunks.items()):
            if token_hash in token_hashes:
                del self._chunks[run, start]
                self._matcher.discard(run, Span(start, start + self._chunk_size))


def pytest_configure() -> None:
    # Without what LMCache compiles, of which its matcher uses nothing, the tests would be skipped.
    sys.modules["lmcache.lmcache_native"] = MagicMock(TransferDirection=IntEnum("TransferDirection", ("D2H", "H2D")))
    from lmcache.v1.multiprocess.modules.blend import matcher

    if recorder.OURS:
        matcher.BlendTokenRangeMatcher = Matcher
