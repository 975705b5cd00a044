"""Texts whose KV a client writes into the mapped arena itself, and checks there."""

from typing import Any

import numpy as np

from blendhub.client.hub_client import HubClient
from blendhub.core.spans import Span
from tests.hub.hub_direct import marks


def store(client: HubClient, text: np.ndarray, **about: Any) -> None:
    reserved = client.reserve(text, Span(0, len(text)), **about)
    if reserved.right is None:
        return
    with client.writing(reserved.right):
        for slot in reserved.slots:
            client.shard(slot.slot)[: 4 * len(slot.span)] = marks(text, slot.span, 0)
    client.commit(reserved.right, reserved.span.end)


def check(client: HubClient, text: np.ndarray, wait_s: float = 0.0) -> int:
    """Look up a text, check the bytes that are found, and return the number of tokens."""
    copies = []
    with client.reading(client.lookup(text, wait_s=wait_s)) as pieces:
        for piece in pieces:
            rows = client.shard(piece.shard).view(np.uint32)[piece.row : piece.row + len(piece.span)]
            copies.append((piece.span, rows.copy()))
    for span, rows in copies:
        assert np.array_equal(rows, text[span.start : span.end] ^ np.uint32(1))
    return sum(len(span) for span, _ in copies)
