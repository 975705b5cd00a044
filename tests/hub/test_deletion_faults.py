"""Deletion by a real hub that is killed in the middle of it."""

import contextlib
import threading
import time

import pytest

from blendhub.client.hub_client import HubClient
from blendhub.core.errors import BlendHubError
from blendhub.hub.memory.segments import remove_leftovers
from tests.hub.hub_direct import CHUNK, namespace, tokens
from tests.hub.mapped import check, store
from tests.hub.processes import HubProcess, until

pytestmark = pytest.mark.slow
N_TEXTS = 40
"""Each of six chunks: a deletion takes long enough to be hit."""


def files(folder):
    return len(list(folder.rglob("*.kv")))


def test_a_hub_killed_while_it_deletes_loses_nothing_of_others_and_the_next_deletion_finishes(tmp_path):
    place = tmp_path / "store"
    hub = HubProcess(tmp_path, store=place, arena_gib=0.02)
    doomed = [tokens(100 + number, 6 * CHUNK) for number in range(N_TEXTS)]
    kept = [tokens(300 + number, 2 * CHUNK) for number in range(10)]
    try:
        with HubClient(hub.endpoint) as client:
            client.register("e", namespace(), rank=0)
            for text in doomed:
                store(client, text, request="cmpl-secret-0-1a2b3c4d")
            for number, text in enumerate(kept):
                store(client, text, request=f"cmpl-other-{number}-1a2b3c4d")
            until(lambda: not client.stats().gauges["store_waiting_chunks"])
        whole = files(place)
        for _ in range(3):
            deleting = threading.Thread(target=forget, args=[hub.endpoint])
            deleting.start()
            deadline = time.monotonic() + 10
            before = files(place)
            while files(place) > before - 20 and deleting.is_alive() and time.monotonic() < deadline:
                time.sleep(0.0005)
            hub.kill()
            deleting.join()
            hub.start()
        assert files(place) < whole, "no deletion had begun when the hub was killed"
        with HubClient(hub.endpoint) as client:
            client.register("e", namespace(), rank=0)
            client.forget(request="cmpl-secret")
            assert client.forget(request="cmpl-secret").tokens == 0
            for text in doomed:
                assert not client.lookup(text, acquire=False, wait_s=5.0).matches
            for text in kept:
                assert check(client, text, wait_s=5.0) == len(text)
    finally:
        hub.kill()
        remove_leftovers()
    assert files(place) == 10 * 2, "two chunks of each text that another request stored"


def forget(endpoint):
    with HubClient(endpoint, timeout=10.0) as client, contextlib.suppress(BlendHubError):
        client.forget(request="cmpl-secret")  # the hub is killed meanwhile
