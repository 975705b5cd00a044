"""Three ways to have a hub in a test: called directly, embedded (``embedded_hub``), and in a process to be killed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendhub.hub.memory.segments import remove_leftovers
from tests.hub.hub_direct import DirectHub
from tests.hub.processes import HubProcess


@pytest.fixture
def make_hub() -> Iterator[Callable[..., DirectHub]]:
    """Makes hubs that are called directly; their state is checked and they are closed after the test."""
    hubs: list[DirectHub] = []

    def make(n_slots: int = 64, *store: Any, **options: Any) -> DirectHub:
        hubs.append(DirectHub(n_slots, *store, **options))
        return hubs[-1]

    yield make
    for hub in hubs:
        hub.close()
    for hub in hubs:
        hub.state.check_integrity()


@pytest.fixture
def hub(make_hub: Callable[..., DirectHub]) -> DirectHub:
    return make_hub()


@pytest.fixture
def hub_process(tmp_path: Path) -> Iterator[Callable[..., HubProcess]]:
    """Starts hubs in processes of their own, and kills them after the test."""
    started: list[HubProcess] = []

    def start(**options: Any) -> HubProcess:
        started.append(HubProcess(tmp_path, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
    remove_leftovers()
