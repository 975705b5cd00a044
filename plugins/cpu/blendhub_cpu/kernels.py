"""Compiled copies between rows of the arena and blocks of pages; they release the GIL.

Kernels work on addresses, because one call serves the tensors of all layers. They check nothing: their input was
checked by :class:`blendhub.devices.Bounds` and :mod:`blendhub_cpu.pages`. Strides are in bytes.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from blendhub_cpu import dtypes, memory, rotation
from blendhub_cpu.memory import copy_rows, transpose
from blendhub_cpu.rotation import angles_between, rotate

PLANE_RECORD = np.dtype(
    [
        ("address", np.int64),  # of block 0
        ("block_stride", np.int64),
        ("head_stride", np.int64),
        ("token_stride", np.int64),
        ("heads", np.int64),  # contiguous heads count as one
        ("width", np.int64),  # items of a head
        ("transposed", np.int64),  # 0, or the distance of a head's items; its tokens are contiguous then
        ("shard_offset", np.int64),  # of the first row in a shard
        ("row_bytes", np.int64),
        ("rotation", np.int64),  # index in the array of rotations; NONE: these rows are never rotated
    ]
)
ROTATION_RECORD = np.dtype(
    [
        ("address", np.int64),  # of cos_sin, whose rows are contiguous
        ("half", np.int64),  # angles of a row
        ("neox", np.int64),
        ("offset", np.int64),
        ("heads", np.int64),
        ("width", np.int64),  # items of a key
    ]
)
NONE = -1


def _digest_of_sources() -> str:
    sources = (Path(module.__file__).read_bytes() for module in (dtypes, memory, rotation) if module.__file__)
    return hashlib.blake2b(b"".join(sources)).hexdigest()


def _compiled(sources: str) -> tuple[Any, Any]:
    """The kernels. Numba's disk cache does not notice changes of the other modules whose functions a kernel calls. It
    does compare closure variables, so the kernels close over ``sources``, a digest of those modules.
    """

    @njit(nogil=True, cache=True)
    def rows_to_pages(arena, spans, planes, rotations, rotated, angles):
        """Copy each block span's rows to its block, in every plane.

        ``rotated`` is a buffer for the keys of one block, of the carrier's type; ``angles`` is one for the
        cosines and sines of as many tokens.
        """
        sources  # noqa: B018
        size = rotated.itemsize
        for span in spans:
            current = NONE  # the rotation that ``angles`` holds
            for plane in planes:
                source = arena + span.shard + plane.shard_offset + span.row * plane.row_bytes
                if plane.rotation != NONE and span.source != span.position:
                    rotation = rotations[plane.rotation]
                    if plane.rotation != current:
                        current = plane.rotation
                        angles_between(angles.ctypes.data, rotation, span)
                    rotate(rotated.ctypes.data, source, angles.ctypes.data, rotation, span.count, rotated)
                    source = np.int64(rotated.ctypes.data)
                page = plane.address + span.block * plane.block_stride + span.slot * plane.token_stride
                nbytes = plane.width * size
                for head in range(plane.heads):
                    target = page + head * plane.head_stride
                    rows = source + head * nbytes
                    if plane.transposed:
                        transpose(target, plane.transposed, rows, plane.row_bytes, span.count, plane.width, rotated)
                    else:
                        copy_rows(target, plane.token_stride, rows, plane.row_bytes, span.count, nbytes)

    @njit(nogil=True, cache=True)
    def pages_to_rows(arena, spans, planes, like):
        """Copy each block span's tokens from its block to its rows, in every plane; ``like`` has the carrier's type."""
        sources  # noqa: B018
        for span in spans:
            for plane in planes:
                page = plane.address + span.block * plane.block_stride + span.slot * plane.token_stride
                first = arena + span.shard + plane.shard_offset + span.row * plane.row_bytes
                nbytes = plane.width * like.itemsize
                for head in range(plane.heads):
                    source = page + head * plane.head_stride
                    rows = first + head * nbytes
                    if plane.transposed:
                        transpose(rows, plane.row_bytes, source, plane.transposed, plane.width, span.count, like)
                    else:
                        copy_rows(rows, plane.row_bytes, source, plane.token_stride, span.count, nbytes)

    return rows_to_pages, pages_to_rows


rows_to_pages, pages_to_rows = _compiled(_digest_of_sources())
