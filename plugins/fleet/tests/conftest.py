"""A redis-server for the tests of this distribution."""

from collections.abc import Iterator

import pytest

from harness.servers.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server
