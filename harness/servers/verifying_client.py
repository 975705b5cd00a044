"""A hub's client whose bytes follow from the tokens, so that it can check every byte that it reads."""

import random
import time
from collections import Counter

import numpy as np
import numpy.typing as npt

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import LeaseError
from blendhub.core.layout import KVLayout, Namespace
from blendhub.core.spans import Span

Array = npt.NDArray[np.uint32]
ROW = np.arange(1, 33, dtype=np.uint32) * np.uint32(2654435761)


SMALL = Namespace(
    model="soak",
    layout=KVLayout(layers=2, kv_heads=1, key_dim=32, value_dim=32, dtype="float32", chunk_tokens=64),
)


def read(client: HubClient, prompt: Array, counted: Counter[str]) -> float:
    """Look the prompt up, copy what is found, and compare every byte once the lease has proven itself.

    Returns the seconds that the lookup took.
    """
    begun = time.perf_counter()
    found = client.lookup(prompt)
    seconds = time.perf_counter() - begun
    counted["lookups"] += 1
    copies: list[tuple[Span, Array]] = []
    try:
        with client.reading(found) as pieces:
            for piece in pieces:
                rows = _rows(client, piece.shard)
                copies.append((piece.span, rows[:, piece.row : piece.row + len(piece.span)].copy()))
    except LeaseError:
        counted["leases that ran out"] += 1
        return seconds
    for span, rows in copies:
        counted["tokens read"] += len(span)
        counted["bytes verified"] += rows.nbytes
        counted["WRONG TOKENS"] += int((rows != _content(prompt, span)).any(axis=(0, 2)).sum())
    return seconds


def write(client: HubClient, prompt: Array, chance: random.Random, counted: Counter[str]) -> None:
    """Store the prompt; now and then leave it unfinished or take it back."""
    reserved = client.reserve(prompt, Span(0, len(prompt)))
    if reserved.right is None:
        return
    fate = chance.random()
    for slot in reserved.slots:
        with client.writing(reserved.right):
            _rows(client, slot.slot)[:, : len(slot.span)] = _content(prompt, slot.span)
        if fate < 0.05:
            counted["writes left unfinished"] += 1
            return
    if fate < 0.1:
        client.abort(reserved.right)
        counted["writes aborted"] += 1
        return
    client.commit(reserved.right, reserved.span.end)
    counted["tokens stored"] += len(reserved.span)


def _rows(client: HubClient, slot: int) -> Array:
    """A slot as [part, token, word]: keys and values of each layer."""
    layout = client.namespace.layout
    rows: Array = client.shard(slot).view(np.uint32).reshape(2 * layout.layers, layout.chunk_tokens, len(ROW))
    return rows


def _content(prompt: Array, span: Span) -> Array:
    """The bytes that these tokens' rows must hold, different in every part."""
    parts = np.arange(4, dtype=np.uint32)[:, None, None]
    content: Array = (prompt[span.start : span.end, None] * ROW)[None] ^ parts
    return content
