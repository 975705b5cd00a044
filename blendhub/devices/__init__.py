"""Shared parts of device plugins: input checks, uniform views of pages, and transfers on streams. Needs torch."""

from blendhub.devices.batches import Batch, BatchPlanner
from blendhub.devices.bounds import Bounds, after_prefix, check_arena, check_chunks, check_writable, group_at
from blendhub.devices.host_arena import HostArena, PinningThread
from blendhub.devices.pages import TENSOR_TYPES, Pages, Planes, planes_of, read_pages, rows_at
from blendhub.devices.queues import Mover
from blendhub.devices.rotation import Angles, angles_between, pairs_of
from blendhub.devices.runtime import Runtime
from blendhub.devices.stream_device import ACCESS_BYTES, StreamDevice

__all__ = [
    "ACCESS_BYTES",
    "TENSOR_TYPES",
    "Angles",
    "Batch",
    "BatchPlanner",
    "Bounds",
    "HostArena",
    "Mover",
    "Pages",
    "PinningThread",
    "Planes",
    "Runtime",
    "StreamDevice",
    "after_prefix",
    "angles_between",
    "check_arena",
    "check_chunks",
    "check_writable",
    "group_at",
    "pairs_of",
    "planes_of",
    "read_pages",
    "rows_at",
]
