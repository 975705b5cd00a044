"""Shared parts of device plugins: input checks, uniform views of pages, and a runtime with streams. Needs torch."""

from blendhub.devices.bounds import Bounds, check_arena, check_writable
from blendhub.devices.pages import check_pages, count_blocks, count_positions, planes_of
from blendhub.devices.runtime import Runtime

__all__ = [
    "Bounds",
    "Runtime",
    "check_arena",
    "check_pages",
    "check_writable",
    "count_blocks",
    "count_positions",
    "planes_of",
]
