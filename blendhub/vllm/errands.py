"""What the scheduler's side asks of the hub while the scheduler goes on."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from blendhub.client import HubClient
from blendhub.errors import BlendHubError
from blendhub.layout import Namespace
from blendhub.vllm.sessions import Sessions

T = TypeVar("T")


class Errands:
    """Runs requests to the hub on a thread of its own: one, so that what is asked in order is done in order."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blendhub-scheduler")

    def session(self, namespace: Namespace) -> "Future[HubClient]":
        """The session of a namespace, opened if need be."""
        return self._thread.submit(self._sessions.open, namespace)

    def run(self, namespace: Namespace, work: Callable[[HubClient], T]) -> "Future[T]":
        """Something to be asked in a namespace."""
        return self._thread.submit(lambda: work(self._sessions.open(namespace)))

    def quietly(self, namespace: Namespace, work: Callable[[HubClient], None]) -> None:
        """Something the hub is told, and nobody waits for."""

        def do() -> None:
            with contextlib.suppress(BlendHubError):
                work(self._sessions.open(namespace))

        self._thread.submit(do)

    def clear(self) -> None:
        """Forget what is stored in the namespaces that are open; waits until it is done."""
        self._thread.submit(self._sessions.clear).result()

    def close(self) -> None:
        """Finish what was asked, and leave the hub."""
        self._thread.shutdown(wait=True)
        self._sessions.close()
