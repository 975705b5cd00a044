"""The connection to Redis: deadlines, errors that say what to do, and no call while it is known to be away."""

import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from blendhub.core.errors import InvalidInput, OptionError, StoreAway, StoreFailed

T = TypeVar("T")
Doing = Literal["read", "write"]
REST_S = 0.5
"""How long calls of a kind fail at once after one failed, so that callers do not wait for deadline after deadline."""
BLOCK_S = 1.0
"""The longest that Redis is asked to wait for something to come."""


class Link:
    """Redis, called from several threads at once."""

    def __init__(self, url: str, deadline_s: float) -> None:
        self.failures = 0
        self._rests: dict[Doing, tuple[float, type[StoreFailed]]] = {}
        """Until when calls of a kind are not tried, and how they fail."""
        try:
            self._redis = _client(url, deadline_s, deadline_s)
            self._blocked = _client(url, deadline_s, deadline_s + BLOCK_S)
        except ValueError as error:
            raise OptionError(f"catalogue is no URL of Redis: {error}; write redis://HOST:6379") from None
        server = self._redis.get_connection_kwargs()
        self.place = f"Redis at {server.get('path') or '{host}:{port}'.format(**server)}"

    def do(self, doing: Doing, work: Callable[[Any], T], *, rests: bool = True) -> T:
        """The result of work with Redis.

        Raises StoreFailed if Redis does not do it, or, unless ``rests`` is false, if it failed a moment ago; where it
        does not answer, that is StoreAway.
        """
        if rests:
            self.check(doing)
        return self._try(doing, work, self._redis)

    def wait(self, work: Callable[[Any], T]) -> T:
        """The result of a command that blocks in Redis, for BLOCK_S at most."""
        return self._try("read", work, self._blocked)

    def check(self, doing: Doing) -> None:
        """Raise StoreFailed if Redis failed to do so a moment ago."""
        until, kind = self._rests.get(doing, (0.0, StoreFailed))
        if time.monotonic() < until:
            raise kind(f"{self.place} failed to {doing} a moment ago; the hub tries it again soon")

    def close(self) -> None:
        self._redis.close()
        self._blocked.close()

    def _try(self, doing: Doing, work: Callable[[Any], T], client: Any) -> T:
        try:
            result = work(client)
        except redis.RedisError as error:
            raise self._error(doing, error) from error
        self._rests.pop(doing, None)
        return result

    def _error(self, doing: Doing, error: redis.RedisError) -> Exception:
        text = str(error)
        if "NORUN" in text:
            return InvalidInput("the run is not in the catalogue any more; call save_run first")
        self.failures += 1
        if "FENCED" in text:
            return StoreAway("the fleet took this hub for dead, so what it began before is not published")
        away = isinstance(error, redis.ConnectionError | redis.TimeoutError)
        kinds: tuple[Doing, ...] = ("read", "write") if away else (doing,)
        failure = StoreAway if away else StoreFailed
        self._rests.update(dict.fromkeys(kinds, (time.monotonic() + REST_S, failure)))
        return failure(f"{self.place} failed to {doing}: {type(error).__name__}: {text}")


def _client(url: str, connect_s: float, answer_s: float) -> Any:
    # A connection that was broken since its last use is made anew, once. A deadline is not tried a second time.
    again = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(url, socket_connect_timeout=connect_s, socket_timeout=answer_s, retry=again)
