"""The conformance suite of shared stores, run on those of this distribution."""

import hashlib
from pathlib import Path

import pytest
from blendhub_fleet.directory import open_store
from blendhub_fleet.options import DirectoryOptions

from benchmarks.fleet.servers import RedisServer
from blendhub.contracts import SharedStore
from blendhub.testing.shared_stores import SharedStoreSuite


class TestDirectory(SharedStoreSuite):
    @pytest.fixture(autouse=True)
    def server(self, redis_server: RedisServer) -> None:
        type(self).url = redis_server.url

    def create(self, place: Path, capacity: int, log_length: int) -> SharedStore:
        group = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return open_store(
            DirectoryOptions(
                catalogue=self.url,
                group=group,
                path=str(place),
                capacity_gib=capacity / 2**30,
                log_length=log_length,
                deadline_s=30.0,
            )
        )

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
