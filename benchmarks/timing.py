"""Times of functions, side by side, and how far a measurement is."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO, TypeVar

T = TypeVar("T")


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_turn(
    jobs: Mapping[str, Callable[[], Any]],
    rounds: int,
    seconds_of: Callable[[Callable[[], Any]], float] = seconds,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """The seconds of each job, all jobs in turn; without the first rounds, which warm up."""
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in progress(range(warm_up + rounds), " and ".join(jobs)):
        for name, job in jobs.items():
            taken[name].append(seconds_of(job))
    return {name: times[warm_up:] for name, times in taken.items()}


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def progress(steps: Sequence[T], what: str, out: TextIO | None = None) -> Iterator[T]:
    """The steps, with a line each quarter on ``out``, by default stderr."""
    begun = time.monotonic()
    for done, step in enumerate(steps, 1):
        yield step
        if 4 * done // len(steps) > 4 * (done - 1) // len(steps):
            taken = f"{time.monotonic() - begun:.0f} s"
            print(f"{what}: {done} of {len(steps)}, {taken}", file=out or sys.stderr, flush=True)
