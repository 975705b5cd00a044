"""What a hub holds in benchmarks without an engine: random tokens."""

import numpy as np

from blendhub.client.hub_client import HubClient
from blendhub.core.spans import Span


def random_tokens(seed: int, n: int = 2048) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 150_000, n, dtype=np.uint32)


def store(client: HubClient, tokens: np.ndarray) -> None:
    """Have a hub hold them, as if an engine had computed their KV."""
    reserved = client.reserve(tokens, Span(0, len(tokens))).result()
    if reserved.right is not None:
        client.commit(reserved.right, reserved.span.end).result()
