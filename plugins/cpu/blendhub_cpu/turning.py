"""Compiled turning of keys, from the position they were stored for to another one."""

import numpy as np
from numba import carray

from blendhub_cpu.items import decode, encode
from blendhub_cpu.memory import copy_bytes, inlined, pointer


@inlined
def _numbers(address, count):
    return carray(pointer(address), count, np.float32)


@inlined
def angles_between(angles, rotation, piece):
    """The angle that leads each token of a piece from its old position to its new one: all cosines, then all sines."""
    half = rotation.half
    for token in range(piece.count):
        new = rotation.address + (piece.position + token) * 8 * half
        old = rotation.address + (piece.source + token) * 8 * half
        cos_new, sin_new = _numbers(new, half), _numbers(new + 4 * half, half)
        cos_old, sin_old = _numbers(old, half), _numbers(old + 4 * half, half)
        cos, sin = _numbers(angles + token * 8 * half, half), _numbers(angles + (2 * token + 1) * 4 * half, half)
        for k in range(half):
            cos[k] = (cos_new[k] * cos_old[k] + sin_new[k] * sin_old[k]) / (
                cos_old[k] * cos_old[k] + sin_old[k] * sin_old[k]
            )
        for k in range(half):
            sin[k] = (sin_new[k] * cos_old[k] - cos_new[k] * sin_old[k]) / (
                cos_old[k] * cos_old[k] + sin_old[k] * sin_old[k]
            )


@inlined
def _turn_halves(target, source, angle, half, items):
    """The first half of a vector is paired with the second; each pair is turned by its angle."""
    behind = half * items.itemsize
    cos, sin = _numbers(angle, half), _numbers(angle + 4 * half, half)
    one, other = carray(pointer(source), half, items.dtype), carray(pointer(source + behind), half, items.dtype)
    # Two loops: with both stores in one, the compiler does not see that all these vectors lie apart.
    turned_one = carray(pointer(target), half, items.dtype)
    for k in range(half):
        turned_one[k] = encode(decode(one[k]) * cos[k] - decode(other[k]) * sin[k], items[0])
    turned_other = carray(pointer(target + behind), half, items.dtype)
    for k in range(half):
        turned_other[k] = encode(decode(other[k]) * cos[k] + decode(one[k]) * sin[k], items[0])


@inlined
def _turn_neighbours(target, source, angle, half, items):
    """Each two neighbours of a vector are turned by their angle."""
    cos, sin = _numbers(angle, half), _numbers(angle + 4 * half, half)
    read = carray(pointer(source), 2 * half, items.dtype)
    turned = carray(pointer(target), 2 * half, items.dtype)
    for k in range(half):
        one, other = decode(read[2 * k]), decode(read[2 * k + 1])
        turned[2 * k] = encode(one * cos[k] - other * sin[k], items[0])
        turned[2 * k + 1] = encode(other * cos[k] + one * sin[k], items[0])


@inlined
def turn(target, source, angles, rotation, count, items):
    """Keys at ``source``, one row a token, turned; what of them does not turn is copied."""
    size = items.itemsize
    half, neox, heads, width, offset = rotation.half, rotation.neox, rotation.heads, rotation.width, rotation.offset
    for token in range(count):
        angle = angles + token * 8 * half
        for head in range(heads):
            at = (token * heads + head) * width * size
            if 2 * half < width:
                copy_bytes(target + at, source + at, width * size)
            at += offset * size
            if neox:
                _turn_halves(target + at, source + at, angle, half, items)
            else:
                _turn_neighbours(target + at, source + at, angle, half, items)
