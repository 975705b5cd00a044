"""A hub of this process that does nothing for a while, as one whose process is stopped."""

import contextlib
import threading
from collections.abc import Iterator

from blendhub.hub.embedded import HubInThread


@contextlib.contextmanager
def standing_still(hub: HubInThread) -> Iterator[None]:
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        goes_on.wait(30)

    hub._loop.call_soon_threadsafe(stand)
    assert stands.wait(5)
    try:
        yield
    finally:
        goes_on.set()
