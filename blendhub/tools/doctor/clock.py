"""Whether time passes as BlendHub needs it."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from blendhub.tools.doctor.access import as_root, quoted
from blendhub.tools.doctor.circumstances import Circumstances
from blendhub.tools.doctor.finding import Finding, ok, warn
from blendhub.tools.doctor.stores import store_directory

OFFSETS = Path("/proc/self/timens_offsets")
SOURCES = Path("/sys/devices/system/clocksource/clocksource0")
SLOW_S = 1e-6
READINGS = 1_000
ROUNDS = 10
"""The number of rounds. The quickest one counts: the system may have run something else during the others."""
WATCHED_S = 0.3
MOST_STEP_S = 0.05
IN_THE_FUTURE_S = 60.0
MOST_FILES = 10_000


def clock(at: Circumstances) -> Iterator[Finding]:
    wrong = [*_namespace(), *_steps(), *_speed(), *_future(at)]
    yield from wrong or [ok("it runs evenly, is quick to read, and no file of the store is dated after it")]


def _namespace() -> Iterator[Finding]:
    """Check for a time namespace: there, processes show other start times, by which a hub tells them apart."""
    try:
        offsets = [line.split() for line in OFFSETS.read_text(encoding="ascii").splitlines()]
    except OSError:  # a kernel without time namespaces
        return
    shifted = [f"{name} by {seconds} s" for name, seconds, _ in offsets if seconds != "0"]
    if shifted:
        yield warn(
            f"a time namespace shifts {' and '.join(shifted)}: a hub outside of it takes engines for dead",
            as_root("nsenter --target 1 --time blendhub doctor"),
        )


def _steps() -> Iterator[Finding]:
    """Check for steps of the wall clock: hubs and clients of one machine subtract each other's readings."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(WATCHED_S)
    step = abs((time.time() - wall) - (time.monotonic() - steady))
    if step > MOST_STEP_S:
        yield warn(
            f"the wall clock was moved by {step:.2f} s within {WATCHED_S} s: requests under way may time out",
            "timedatectl timesync-status",
        )


def _speed() -> Iterator[Finding]:
    each = min(_seconds_of_a_reading() for _ in range(ROUNDS))
    if each > SLOW_S:
        source = (SOURCES / "current_clocksource").read_text(encoding="ascii").strip()
        yield warn(
            f"reading it takes {each * 1e6:.1f} us, several times for each request (its source is {source})",
            as_root(f"echo tsc > {SOURCES}/current_clocksource"),
        )


def _seconds_of_a_reading() -> float:
    started = time.perf_counter()
    for _ in range(READINGS):
        time.monotonic()
    return (time.perf_counter() - started) / READINGS


def _future(at: Circumstances) -> Iterator[Finding]:
    """Check for dates in the future: the store drops what was used longest ago, by the files' dates."""
    folder = store_directory(at)
    if folder is None or not folder.is_dir():
        return
    latest = time.time() + IN_THE_FUTURE_S
    later = [file for file in islice(folder.glob("??/*"), MOST_FILES) if file.lstat().st_mtime > latest]
    if later:
        yield warn(
            f"{len(later)} files of the store in {folder} are dated in the future, and are dropped last: "
            "the clock was set back",
            f"find {quoted(folder)} -type f -newermt now -exec touch {{}} +",
        )
