"""What the suite of shared stores does to a catalogue in Redis."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blendhub.testing.shared_stores.base import FleetTests
from harness.servers.redis_server import RedisServer


class InRedis(FleetTests):
    redis: RedisServer
    deadline_s = 30.0

    def take_for_dead(self, place: Path) -> bool:
        group = self.options_for(place, 1, 1)["group"]
        return bool(self.redis.client().delete(f"blendhub:{{{group}}}:members"))

    @contextmanager
    def silence(self, place: Path) -> Iterator[None]:
        self.deadline_s = 0.5
        with self.redis.stopped():
            yield
