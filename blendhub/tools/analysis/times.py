"""Times as logs write them."""

from datetime import UTC, datetime
from typing import Any

EARLIEST, LATEST = 946_684_800.0, 4_102_444_800.0
"""The years 2000 to 2100, in seconds: times beyond are in smaller units."""


def as_time(given: Any) -> float | None:
    """A time in any unit from seconds to nanoseconds, or as ISO 8601 writes it; None if it is none."""
    if isinstance(given, str):
        try:
            parsed = datetime.fromisoformat(given)
        except ValueError:
            return _number_as_time(given)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    return _number_as_time(given)


def _number_as_time(given: Any) -> float | None:
    if isinstance(given, bool) or given is None:
        return None
    try:
        seconds = float(given)
    except (TypeError, ValueError, OverflowError):
        return None
    for _ in range(4):
        if EARLIEST <= seconds < LATEST:
            return seconds
        seconds /= 1000
    return None
