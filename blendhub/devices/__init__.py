"""Shared parts of device plugins: uniform views of pages, and transfers on streams. Needs torch."""

from blendhub.devices import batches
from blendhub.devices.batches import Batch, BatchPlanner
from blendhub.devices.host_arena import HostArena, PinningThread, reserved_parts
from blendhub.devices.pages import Pages, Planes, planes_of, read_pages, rows_at, torch_type
from blendhub.devices.queues import Mover
from blendhub.devices.rotation import Angles, angles_between, pairs_of
from blendhub.devices.runtime import Runtime
from blendhub.devices.stream_device import ACCESS_BYTES, StreamDevice

__all__ = [
    "ACCESS_BYTES",
    "Angles",
    "Batch",
    "BatchPlanner",
    "HostArena",
    "Mover",
    "Pages",
    "PinningThread",
    "Planes",
    "Runtime",
    "StreamDevice",
    "angles_between",
    "batches",
    "pairs_of",
    "planes_of",
    "read_pages",
    "reserved_parts",
    "rows_at",
    "torch_type",
]
