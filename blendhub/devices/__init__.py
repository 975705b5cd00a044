"""What device plugins share: checks of what they are given, and pages of every format seen alike. Needs torch."""

from blendhub.devices.bounds import Bounds, check_arena, check_writable
from blendhub.devices.pages import check_pages, count_blocks, count_positions, planes_of

__all__ = [
    "Bounds",
    "check_arena",
    "check_pages",
    "check_writable",
    "count_blocks",
    "count_positions",
    "planes_of",
]
