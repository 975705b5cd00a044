"""Shared parts of device plugins: input checks, uniform views of pages, and transfers on streams. Needs torch."""

from blendhub.devices.batches import BatchGroup, BatchPlanner, Mover, Slice
from blendhub.devices.block_spans import BLOCK_SPAN_RECORD, after_prefix, split_at_blocks
from blendhub.devices.bounds import Bounds, check_arena, check_writable
from blendhub.devices.host_arena import HostArena
from blendhub.devices.pages import TENSOR_TYPES, check_pages, count_blocks, count_positions, planes_of
from blendhub.devices.runtime import Runtime
from blendhub.devices.stream_device import StreamDevice

__all__ = [
    "BLOCK_SPAN_RECORD",
    "TENSOR_TYPES",
    "BatchGroup",
    "BatchPlanner",
    "Bounds",
    "HostArena",
    "Mover",
    "Runtime",
    "Slice",
    "StreamDevice",
    "after_prefix",
    "check_arena",
    "check_pages",
    "check_writable",
    "count_blocks",
    "count_positions",
    "planes_of",
    "split_at_blocks",
]
