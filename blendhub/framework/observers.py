"""Calls observers: plugins that watch an engine."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from blendhub.framework.discovery import FOREIGN_ERRORS, OBSERVER_HOOKS, Offer, short
from blendhub.framework.hookspecs import EngineInfo
from blendhub.outcome.report import Outcome

log = logging.getLogger(__name__)
STARTED, DONE, STOPPING = OBSERVER_HOOKS


class Observers:
    """Calls the hooks of all observers on one thread, in order, and never on the caller's.

    No method waits for an observer, but for ``engine_stopping``, up to its timeout. What finds ``max_waiting`` calls
    waiting is dropped and counted in ``dropped``. An observer's first error is logged with its plugin's name, and all
    are counted in ``errors`` under that name; the other observers are called all the same.
    """

    def __init__(self, observers: Sequence[Offer], max_waiting: int = 1000) -> None:
        self.dropped = 0
        self.errors: Counter[str] = Counter()
        self._observers = observers
        self._max_waiting = max_waiting
        self._waiting: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="blendhub-observers", daemon=True)
        if observers:
            self._thread.start()

    def engine_started(self, info: EngineInfo) -> None:
        self._submit(STARTED, info=info)

    def request_done(self, outcome: Outcome) -> None:
        self._submit(DONE, outcome=outcome)

    def engine_stopping(self, timeout: float = 5.0) -> bool:
        """Report the end, and wait until the observers have seen all; False if they have not within ``timeout`` s.

        The end is never dropped. What is reported after it is.
        """
        if not self._observers:
            return True
        if not self._stopping:
            self._stopping = True
            self._waiting.put((STOPPING, {}))
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _submit(self, hook: str, **arguments: Any) -> None:
        if not self._observers:
            return
        if self._stopping or self._waiting.qsize() >= self._max_waiting:
            self.dropped += 1
        else:
            self._waiting.put((hook, arguments))

    def _run(self) -> None:
        warned, hook = False, ""
        while hook != STOPPING:
            hook, arguments = self._waiting.get()
            for observer in self._observers:
                self._call(observer, hook, arguments)
            if self.dropped and not warned:
                warned = True
                log.warning(
                    "observers are slower than requests end, so some calls are dropped; uninstall the slow one of: %s",
                    ", ".join(observer.origin for observer in self._observers),
                )

    def _call(self, observer: Offer, hook: str, arguments: dict[str, Any]) -> None:
        assert observer.hooks
        try:
            observer.hooks[hook](**arguments)
        except FOREIGN_ERRORS as error:
            if not self.errors[observer.origin]:
                log.error("%s failed in %s: %s", observer.origin, hook, short(error), exc_info=error)
            self.errors[observer.origin] += 1
