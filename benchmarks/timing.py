"""Times of functions, and how far a measurement is."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def progress(steps: Sequence[T], what: str, out: TextIO | None = None) -> Iterator[T]:
    """The steps, with a bar if ``out``, by default stderr, is a terminal, and otherwise with a line each quarter."""
    out = out or sys.stderr
    if out.isatty():
        yield from track(steps, what, console=Console(file=out))
        return
    for done, step in enumerate(steps, 1):
        yield step
        if 4 * done // len(steps) > 4 * (done - 1) // len(steps):
            print(f"{what}: {done} of {len(steps)}", file=out, flush=True)
