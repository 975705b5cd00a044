"""What the tests share: processes of Mooncake, an arena, and the bytes between them."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from blendhub_mooncake import probe
from blendhub_mooncake.frames import ChildSetup

from blendhub.client.arena_view import HEADER_BYTES, SHM
from blendhub.contracts import ArenaFile
from blendhub.hub.memory.arena import Arena
from harness.servers.mooncake_cluster import Cluster


@pytest.fixture(scope="session")
def mooncake_is_here() -> None:
    if missing := probe():
        pytest.skip(f"{missing.reason}: {missing.command}")


@pytest.fixture
def cluster(mooncake_is_here: None) -> Iterator[Cluster]:
    """Without any process yet."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def lasting_cluster(mooncake_is_here: None) -> Iterator[Cluster]:
    """A master and a node, for tests that leave them alone."""
    with Cluster() as cluster:
        cluster.start_master()
        cluster.start_node()
        yield cluster


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with contextlib.closing(Arena(2**26)) as arena:
        yield arena


@pytest.fixture(scope="module")
def setup_for(arena: Arena) -> Callable[[Cluster], ChildSetup]:
    file = ArenaFile(str(SHM / arena.name.segment), HEADER_BYTES, arena.name.size)
    return lambda cluster: ChildSetup(file, cluster.address)
