"""Compiled rotation of keys from the position they were stored for to another one."""

import numpy as np
from numba import carray

from blendhub_cpu.dtypes import decode, encode
from blendhub_cpu.memory import copy_bytes, device_function, pointer


@device_function
def _floats(address, count):
    return carray(pointer(address), count, np.float32)


@device_function
def angles_between(angles, rotation, span):
    """Each token's angles from its old position to its new one: all cosines, then all sines."""
    half = rotation.half
    for token in range(span.count):
        new = rotation.address + (span.position + token) * 8 * half
        old = rotation.address + (span.source + token) * 8 * half
        cos_new, sin_new = _floats(new, half), _floats(new + 4 * half, half)
        cos_old, sin_old = _floats(old, half), _floats(old + 4 * half, half)
        cos, sin = (
            _floats(angles + token * 8 * half, half),
            _floats(angles + (2 * token + 1) * 4 * half, half),
        )
        for k in range(half):
            cos[k] = (cos_new[k] * cos_old[k] + sin_new[k] * sin_old[k]) / (
                cos_old[k] * cos_old[k] + sin_old[k] * sin_old[k]
            )
        for k in range(half):
            sin[k] = (sin_new[k] * cos_old[k] - cos_new[k] * sin_old[k]) / (
                cos_old[k] * cos_old[k] + sin_old[k] * sin_old[k]
            )


@device_function
def _rotate_neox(target, source, angle, half, items):
    """Rotate pairs that consist of an item of the first half and one of the second half."""
    behind = half * items.itemsize
    cos, sin = _floats(angle, half), _floats(angle + 4 * half, half)
    one, other = carray(pointer(source), half, items.dtype), carray(pointer(source + behind), half, items.dtype)
    # Two loops: with both stores in one loop, the compiler cannot prove that the vectors do not overlap.
    rotated_one = carray(pointer(target), half, items.dtype)
    for k in range(half):
        rotated_one[k] = encode(decode(one[k]) * cos[k] - decode(other[k]) * sin[k], items[0])
    rotated_other = carray(pointer(target + behind), half, items.dtype)
    for k in range(half):
        rotated_other[k] = encode(decode(other[k]) * cos[k] + decode(one[k]) * sin[k], items[0])


@device_function
def _rotate_interleaved(target, source, angle, half, items):
    """Rotate pairs of neighbouring items."""
    cos, sin = _floats(angle, half), _floats(angle + 4 * half, half)
    read = carray(pointer(source), 2 * half, items.dtype)
    rotated = carray(pointer(target), 2 * half, items.dtype)
    for k in range(half):
        one, other = decode(read[2 * k]), decode(read[2 * k + 1])
        rotated[2 * k] = encode(one * cos[k] - other * sin[k], items[0])
        rotated[2 * k + 1] = encode(other * cos[k] + one * sin[k], items[0])


@device_function
def rotate(target, source, angles, rotation, count, items):
    """Rotate the keys at ``source``, one row for each token; items outside the rotated part are copied."""
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
                _rotate_neox(target + at, source + at, angle, half, items)
            else:
                _rotate_interleaved(target + at, source + at, angle, half, items)
