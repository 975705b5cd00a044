"""Fixtures of the hub's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blendhub.contracts import Store
from blendhub.hub.config import HubConfig
from blendhub.hub.limits import INLINE_TOKENS
from blendhub.hub.memory.segments import remove_leftovers
from tests.hub.hub_direct import DirectHub
from tests.hub.processes import HubProcess


@pytest.fixture
def make_hub() -> Iterator[Any]:
    """Makes hubs, and closes them after the test."""
    made: list[DirectHub] = []

    def make(
        n_slots: int = 64, store: Path | Callable[[], Store] | None = None, inline: int = INLINE_TOKENS, **config: Any
    ) -> DirectHub:
        made.append(DirectHub(HubConfig(**config), n_slots, store, inline))
        return made[-1]

    yield make
    for hub in made:
        if not hub.loop.is_closed():
            hub.close()


@pytest.fixture
def hub(make_hub: Any) -> DirectHub:
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
