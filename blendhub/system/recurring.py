"""Warnings of what happens again and again, such as a full disk: logged once, then counted."""

import logging
import threading
import time
from collections.abc import Hashable

from blendhub.core.errors import BlendHubError

AGAIN_S = 60.0
MAX_KINDS = 100


class RecurringWarnings:
    """One line a minute at most for each kind. Threads may share it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """When each kind was logged last, and how often it has come since."""
        self._lock = threading.Lock()

    def warn(self, kind: Hashable, text: str, error: BaseException | None = None, level: int = logging.WARNING) -> None:
        """Log the text if it is the first of its kind, with the traceback of an error that is not BlendHub's.

        ``level``: the level of the log line, for example INFO for what is expected.
        """
        with self._lock:
            said, unsaid = self._kinds.get(kind, (float("-inf"), 0))
            now = time.monotonic()
            is_said = now - said >= AGAIN_S
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            self._kinds[kind] = (now, 0) if is_said else (said, unsaid + 1)
        if is_said:
            more = f" (and {unsaid} times more since this was said last)" if unsaid else ""
            traced = error if error and not isinstance(error, BlendHubError) else None
            only_counted = "what follows of this kind within a minute is only counted"
            self._log.log(level, "%s%s; %s", text, more, only_counted, exc_info=traced)
