"""Compiled copies between rows of the arena and blocks of pages, which the interpreter's lock does not hold up.

They work on addresses, because one call serves the tensors of all layers. Nothing is checked here: what reaches a
kernel was checked by :mod:`blendhub_cpu.pieces` and :mod:`blendhub_cpu.pages`. Strides are in bytes.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from blendhub_cpu import items, memory, turning
from blendhub_cpu.memory import copy_rows, transpose
from blendhub_cpu.turning import angles_between, turn

PLANE_RECORD = np.dtype(
    [
        ("address", np.int64),  # of block 0
        ("block_stride", np.int64),
        ("head_stride", np.int64),
        ("token_stride", np.int64),
        ("heads", np.int64),  # heads that lie side by side are one
        ("width", np.int64),  # items of a head
        ("transposed", np.int64),  # 0, or how far a head's items are apart; its tokens adjoin then
        ("part", np.int64),  # where the rows begin in a shard
        ("row_bytes", np.int64),
        ("rotation", np.int64),  # index in the array of rotations; NONE: these rows never turn
    ]
)
ROTATION_RECORD = np.dtype(
    [
        ("address", np.int64),  # of cos_sin, whose rows adjoin
        ("half", np.int64),  # angles of a row
        ("neox", np.int64),
        ("offset", np.int64),
        ("heads", np.int64),
        ("width", np.int64),  # items of a key
    ]
)
PIECE_RECORD = np.dtype(
    [
        ("shard", np.int64),  # offset in the arena
        ("row", np.int64),
        ("count", np.int64),  # tokens, all of one block
        ("block", np.int64),
        ("slot", np.int64),  # of the first token in the block
        ("position", np.int64),
        ("source", np.int64),  # the position that its keys are turned for
    ]
)
NONE = -1


def _digest_of_sources() -> str:
    sources = (Path(module.__file__).read_bytes() for module in (items, memory, turning) if module.__file__)
    return hashlib.blake2b(b"".join(sources)).hexdigest()


def _compiled(sources: str) -> tuple[Any, Any]:
    """The kernels. Numba's cache on disk would not notice that a file they call into has changed; it does compare what
    a kernel closes over, and so they close over ``sources``.
    """

    @njit(nogil=True, cache=True)
    def rows_to_pages(arena, pieces, planes, rotations, turned, angles):
        """Copy each piece's rows to its block, in every plane.

        ``turned`` has room for the keys of one block, and its type is the items' carrier; ``angles`` has room for
        the rotated width of as many tokens.
        """
        sources  # noqa: B018
        size = turned.itemsize
        for piece in pieces:
            current = NONE  # the rotation whose angles are computed
            for plane in planes:
                source = arena + piece.shard + plane.part + piece.row * plane.row_bytes
                if plane.rotation != NONE and piece.source != piece.position:
                    rotation = rotations[plane.rotation]
                    if plane.rotation != current:
                        current = plane.rotation
                        angles_between(angles.ctypes.data, rotation, piece)
                    turn(turned.ctypes.data, source, angles.ctypes.data, rotation, piece.count, turned)
                    source = np.int64(turned.ctypes.data)
                page = plane.address + piece.block * plane.block_stride + piece.slot * plane.token_stride
                nbytes = plane.width * size
                for head in range(plane.heads):
                    target = page + head * plane.head_stride
                    rows = source + head * nbytes
                    if plane.transposed:
                        transpose(target, plane.transposed, rows, plane.row_bytes, piece.count, plane.width, turned)
                    else:
                        copy_rows(target, plane.token_stride, rows, plane.row_bytes, piece.count, nbytes)

    @njit(nogil=True, cache=True)
    def pages_to_rows(arena, pieces, planes, like):
        """Copy each piece's tokens from its block to its rows, in every plane; the type of ``like`` is the carrier."""
        sources  # noqa: B018
        for piece in pieces:
            for plane in planes:
                page = plane.address + piece.block * plane.block_stride + piece.slot * plane.token_stride
                first = arena + piece.shard + plane.part + piece.row * plane.row_bytes
                nbytes = plane.width * like.itemsize
                for head in range(plane.heads):
                    source = page + head * plane.head_stride
                    rows = first + head * nbytes
                    if plane.transposed:
                        transpose(rows, plane.row_bytes, source, plane.transposed, plane.width, piece.count, like)
                    else:
                        copy_rows(rows, plane.row_bytes, source, plane.token_stride, piece.count, nbytes)

    return rows_to_pages, pages_to_rows


rows_to_pages, pages_to_rows = _compiled(_digest_of_sources())
