"""The conformance suite of shared stores, run on those of this distribution."""

import hashlib
from pathlib import Path

import pytest

from blendhub import PluginHost
from blendhub.contracts import SharedStore
from blendhub.testing.shared_stores import SharedStoreSuite
from blendhub.testing.target import Target
from harness.servers.redis_server import RedisServer, needs_redis

pytestmark = [pytest.mark.slow, needs_redis]
HOST = PluginHost.discover()


class TestDirectory(SharedStoreSuite):
    url: str

    @pytest.fixture(autouse=True)
    def server(self, redis_server: RedisServer) -> None:
        type(self).url = redis_server.url

    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        group = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        options = {"catalogue": self.url, "group": group, "path": str(place), "log_length": log_length}
        bounds = {"capacity_gib": capacity / 2**30, "deadline_s": 30.0}
        store: SharedStore = HOST.create("store", "shared_directory", options | bounds)
        return store

    def lose_bytes(self, place: Path) -> bool:
        for file in place.rglob("*.kv"):
            file.unlink()
        return True

    def flip_bytes(self, place: Path) -> bool:
        for file in place.rglob("*.kv"):
            content = bytearray(file.read_bytes())
            content[100] ^= 4
            file.write_bytes(content)
        return True


def test_the_conformance_command_takes_the_suite_of_shared_stores() -> None:
    assert issubclass(Target("store", "shared_directory", {"path": "/mnt/kv"}).suite(), SharedStoreSuite)
