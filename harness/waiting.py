"""Waiting for what other processes do, ending them, and ports that they may listen at."""

import socket
import time
from collections.abc import Callable
from typing import Any, Self


class Closing:
    """What is closed at the end of a ``with`` block."""

    close: Callable[[], Any]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def wait_until(attempt: Callable[[], object], timeout_s: float, every_s: float = 0.05) -> None:
    """Try until the attempt neither raises nor returns False."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            if attempt() is not False:
                return
            failure: Exception = AssertionError("it returned False")
        except Exception as error:
            failure = error
        if time.monotonic() > end:
            raise AssertionError(f"it did not come true in {timeout_s:g} s") from failure
        time.sleep(every_s)


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
