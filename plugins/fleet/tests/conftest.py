"""A redis-server for the tests of this distribution, and members of a fleet that have one directory."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blendhub_fleet.directory import open_store
from blendhub_fleet.options import DirectoryOptions

from blendhub.testing.shared_stores.base import Member
from harness.servers.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def place() -> Iterator[Path]:
    """Not below a folder that other users may not enter."""
    with tempfile.TemporaryDirectory(prefix="blendhub-place-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder, "place")


@pytest.fixture
def prefix(place: Path) -> str:
    """The beginning of the keys of Redis that the members use."""
    return f"blendhub:{{{place.parent.name}}}:"


@pytest.fixture
def join(redis_server: RedisServer, place: Path) -> Iterator[Callable[..., Member]]:
    """Opens one more member."""
    members: list[Member] = []

    def open_one_more(**options: Any) -> Member:
        options = {
            "path": str(place),
            "group": place.parent.name,
            "transfer_deadline_s": 20.0,
            "deadline_s": 20.0,
            **options,
        }
        store = open_store(DirectoryOptions(catalogue=redis_server.url, **options))
        members.append(Member(store))
        return members[-1]

    yield open_one_more
    for member in members:
        member.close()
