"""The conformance suite of shared stores, with a real Redis and a real Mooncake; and what one hub stored there is read
through another.

Its histories are left out: each opens hundreds of stores, and a store here is a process. They are about the catalogue,
which the shared directory has as well.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blendhub import PluginHost
from blendhub.client.hub_client import HubClient
from blendhub.contracts import SharedStore
from blendhub.hub.config import StoreChoice
from blendhub.testing.shared_stores.following import FollowingTests
from blendhub.testing.shared_stores.moving import MovingTests
from harness.servers.mooncake_cluster import Cluster
from harness.servers.redis_server import RedisServer, needs_redis
from harness.waiting import wait_until
from plugins.fleet.tests.in_redis import InRedis
from plugins.mooncake.tests.members import child_of
from tests.hub.hub_direct import CHUNK, namespace, tokens
from tests.hub.processes import HubProcess, check, store

pytestmark = [pytest.mark.slow, needs_redis]
HOST = PluginHost.discover()
FOUND_S = 60.0
"""Far more than it takes, on a machine that is busy with other tests."""
WATCH = Path(__file__).parents[3] / "docs/watch.md"
REMOVE_ALL = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]) == 0
assert store.remove_all(True) >= 0
"""


class OnMooncake(InRedis):
    cluster: Cluster

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def servers(cls, lasting_cluster: Cluster) -> Iterator[None]:
        with RedisServer() as cls.redis:
            cls.cluster = lasting_cluster
            yield

    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        servers = {"catalogue": self.redis.url, "master": self.cluster.address}
        deadlines = {"deadline_s": self.deadline_s, "transfer_deadline_s": 30.0}
        options = {**servers, **deadlines, **self.options_for(place, capacity, log_length)}
        store: SharedStore = HOST.create("store", "mooncake", options)
        return store

    def lose_bytes(self, place: Path) -> bool:
        subprocess.run([sys.executable, "-c", REMOVE_ALL, self.cluster.address], check=True, capture_output=True)
        return True

    def flip_bytes(self, place: Path) -> bool:
        self.cluster.flip_a_byte_of_every_page()
        return True


class TestMooncake(OnMooncake, MovingTests):
    test_a_killed_writer = FollowingTests.test_a_killed_writer_leaves_chunks_whole_or_absent


@pytest.mark.long
class TestCatalogue(OnMooncake, FollowingTests):
    """About the catalogue, which the shared directory has as well."""


def test_what_one_hub_stores_another_reads_at_any_place_of_a_prompt_also_when_it_was_killed(
    tmp_path: Path, lasting_cluster: Cluster
) -> None:
    with contextlib.ExitStack() as closing:
        redis = closing.enter_context(RedisServer())
        settings = {"catalogue": redis.url, "master": lasting_cluster.address, "transfer_deadline_s": 10.0}

        def join(name: str) -> tuple[HubProcess, HubClient]:
            (folder := tmp_path / name).mkdir()
            hub = HubProcess(folder, arena_gib=0.02, store=StoreChoice("mooncake", settings))
            closing.callback(hub.stop)
            client = closing.enter_context(HubClient(hub.endpoint))
            client.register(name, namespace(), rank=0)
            return hub, client

        def find(client: HubClient, text: np.ndarray) -> None:
            wait_until(lambda: check(client, text, wait_s=5.0) == len(text), FOUND_S)

        (hub, one), (_, other) = join("one"), join("other")
        text, later = tokens(1, 8 * CHUNK), tokens(2, 8 * CHUNK)
        store(one, text)
        find(other, text)
        assert check(other, np.concatenate([tokens(9, 50), text])) >= 6 * CHUNK, "behind another text"
        store(other, later)
        find(one, later)
        # All but those of the store whose bytes are in a directory.
        documented = set(re.findall(r"`blendhub_(fleet_(?!directory_)\w+)`", WATCH.read_text(encoding="utf-8")))
        stats = one.stats().result()
        shown = {f"{name}_total" for name in stats.counters} | set(stats.gauges)
        assert documented == {name for name in shown if name.startswith("fleet_")}
        # The process that moves the bytes dies with its hub, even if it stands still.
        mover = child_of(hub.process.pid)
        os.kill(mover, signal.SIGSTOP)
        hub.kill()
        wait_until(lambda: not Path(f"/proc/{mover}").exists(), 5)
        find(join("third")[1], text)
