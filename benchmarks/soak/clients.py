"""What the soak's good clients do: store prompts made of shared documents, and compare every byte that they read."""

import random
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection

import numpy as np

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError
from blendhub.core.layout import Namespace
from harness.servers.verifying_client import read, space, write

Report = tuple[Counter[str], float | None]
"""The counts of a client, and the seconds of a lookup, if there was one."""

DOCUMENTS = 150
LONG = 4000
"""Tokens of a long document; one in twenty prompts has one."""


def work(endpoint: str, name: str, chunk_tokens: int, reports: Connection) -> None:
    """One client, until it is terminated or killed."""
    stopped: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    chance = random.Random(f"{name} {time.time_ns()}")
    lengths = [*(200 + 7 * seed for seed in range(DOCUMENTS)), *([LONG] * 5)]
    documents = [
        np.random.default_rng(seed).integers(0, 2**31, length, dtype=np.uint32) for seed, length in enumerate(lengths)
    ]
    with HubClient(endpoint) as client:
        _register(client, name, space(chunk_tokens), stopped)
        while not stopped:
            prompt = np.concatenate([chance.choice(documents) for _ in range(3)])
            counted: Counter[str] = Counter()
            seconds = None
            try:
                seconds = read(client, prompt, counted)
                write(client, prompt, chance, counted)
            except BlendHubError as error:
                counted[f"errors: {type(error).__name__}"] += 1
                time.sleep(0.01)
            reports.send((counted, seconds))


def _register(client: HubClient, name: str, namespace: Namespace, stopped: list[bool]) -> None:
    while not stopped:
        try:
            return client.register(name, namespace, rank=0)
        except BlendHubError:  # the hub is frozen, or being restarted
            time.sleep(0.1)
    return None
