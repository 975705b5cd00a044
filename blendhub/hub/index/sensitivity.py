"""Sensitivity: one byte a stored token that says how much its KV changed when it was computed in another context.

0: the token was never computed twice, so nothing is known. Otherwise the higher the more it changed. Bytes belong to
the chunk that was compared, and are hints: they decide which tokens are computed again, never what is right.
"""

from collections.abc import Sequence

import numpy as np

from blendhub.hub.index.namespace_index import Chunk, ChunkMatch


def known_sensitivity(chunk_matches: Sequence[ChunkMatch]) -> bytearray:
    """One byte for each position of the prompt up to where the last match ends; empty if nothing is known."""
    if not any(found.chunk.sensitivity for found in chunk_matches):
        return bytearray()
    known = bytearray(chunk_matches[-1].end)
    for found in chunk_matches:
        if found.chunk.sensitivity:
            at = found.slot_token
            known[found.start : found.end] = found.chunk.sensitivity[at : at + found.end - found.start]
    return known


def learn(chunk_matches: Sequence[ChunkMatch], measured: bytes) -> list[Chunk]:
    """Take note of a byte for each position of the prompt, 0 where none was measured; returns what chunks changed."""
    known = np.frombuffer(known_sensitivity(chunk_matches) or bytes(len(measured)), np.uint8)
    merged = merge(known, np.frombuffer(measured, np.uint8)[: len(known)]).tobytes()
    changed: dict[Chunk, None] = {}
    for found in chunk_matches:
        n, at = found.end - found.start, found.slot_token
        if measured.count(0, found.start, found.end) == n:
            continue
        chunk = found.chunk
        if chunk.sensitivity is None:
            chunk.run.index.keep_sensitivity(chunk, bytearray(len(chunk.span)))
        assert chunk.sensitivity is not None
        if chunk.sensitivity[at : at + n] != merged[found.start : found.end]:
            chunk.sensitivity[at : at + n] = merged[found.start : found.end]
            changed[chunk] = None
    return list(changed)


def merge(known: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """The largest counts, and decays: by an eighth, rounded up, each time that a token is measured again."""
    decayed = known - (known >> 3) - ((known & 7) > 0)
    return np.where(measured, np.maximum(measured, decayed), known).astype(np.uint8, copy=False)
