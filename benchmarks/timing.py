"""Times of functions, and bars of progress."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def sorted_times(work: Callable[[], object], repeats: int) -> list[float]:
    return sorted(seconds(work) for _ in range(repeats))


def progress(steps: Sequence[T], what: str) -> Iterator[T]:
    """The steps, with a bar on stderr."""
    yield from track(steps, what, console=Console(stderr=True))
