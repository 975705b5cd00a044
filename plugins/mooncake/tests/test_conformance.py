"""The conformance suite of shared stores, with a real Redis and a real Mooncake.

Its histories are left out: each opens hundreds of stores, and a store here is a process. They are about the catalogue,
which the shared directory has as well.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendhub import PluginHost
from blendhub.contracts import SharedStore
from blendhub.testing.shared_stores.following import FollowingTests
from blendhub.testing.shared_stores.moving import MovingTests
from harness.servers.mooncake_cluster import Cluster
from harness.servers.redis_server import RedisServer, needs_redis

pytestmark = [pytest.mark.slow, needs_redis]
HOST = PluginHost.discover()
REMOVE_ALL = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", sys.argv[1]) == 0
assert store.remove_all(True) >= 0
"""


class TestMooncake(MovingTests, FollowingTests):
    cluster: Cluster
    redis: RedisServer

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def servers(cls, lasting_cluster: Cluster) -> Iterator[None]:
        with RedisServer() as cls.redis:
            cls.cluster = lasting_cluster
            yield

    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        servers = {"catalogue": self.redis.url, "master": self.cluster.address}
        deadlines = {"deadline_s": 30.0, "transfer_deadline_s": 30.0}
        options = {**servers, **deadlines, **self.options_for(place, capacity, log_length)}
        store: SharedStore = HOST.create("store", "mooncake", options)
        return store

    def lose_bytes(self, place: Path) -> bool:
        subprocess.run([sys.executable, "-c", REMOVE_ALL, self.cluster.address], check=True, capture_output=True)
        return True

    def flip_bytes(self, place: Path) -> bool:
        self.cluster.flip_a_byte_of_every_page()
        return True
