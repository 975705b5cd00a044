"""Conversions between a cache's items and float32, in compiled code.

Kernels handle an item as its carrier: an integer of the same size whose type selects the conversion, so one kernel
compiles to the right code for each dtype.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

CARRIERS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.uint32),
    "float16": np.dtype(np.int16),
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.int8),
    "int8": np.dtype(np.uint8),  # copied only, never rotated
}


def decode(item):  # type: ignore[no-untyped-def]
    """The value of a carrier as float32."""
    raise NotImplementedError("for compiled code only")


def encode(value, carrier):  # type: ignore[no-untyped-def]
    """A float32 in the format of ``carrier``, whose value is ignored: rounded to nearest, ties to even.

    Values too large for an 8-bit format saturate to its largest number. Otherwise rotating a large key could make it
    NaN, and with it all attention to that key.
    """
    raise NotImplementedError("for compiled code only")


@intrinsic
def _bits_of(typing_context, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _float_of(typing_context, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _widen_half(typing_context, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), generate


@intrinsic
def _narrow_half(typing_context, value):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), generate


class _Float8(NamedTuple):
    """A float of 8 bits."""

    mantissa: int
    bias: int
    largest: float
    infinite: bool
    """Whether the pattern after the largest number is infinity; all patterns beyond are NaN."""


_E4M3 = _Float8(mantissa=3, bias=7, largest=448.0, infinite=False)
_E5M2 = _Float8(mantissa=2, bias=15, largest=57344.0, infinite=True)


# Numba widens 32-bit integers at each operation. Casting back at once fits twice as many in a vector register.


def _decoder(float8: _Float8):  # type: ignore[no-untyped-def]
    shift = np.uint32(23 - float8.mantissa)
    exponents_differ = np.uint32((127 - float8.bias) << 23)
    first_normal = np.uint32(1 << float8.mantissa)
    smallest = np.float32(2.0 ** (1 - float8.bias - float8.mantissa))
    beyond = np.uint32(0x7C if float8.infinite else 0x7F)
    infinity, not_a_number = np.uint32(0x7F800000), np.uint32(0x7FC00000)
    after_beyond = infinity if float8.infinite else not_a_number

    def decode(item):  # type: ignore[no-untyped-def]
        pattern = np.uint32(np.uint32(item) & np.uint32(0x7F))
        sign = np.uint32(np.uint32(np.uint32(item) & np.uint32(0x80)) << np.uint32(24))
        bits = np.uint32(np.uint32(pattern << shift) + exponents_differ)
        if pattern < first_normal:
            bits = _bits_of(np.float32(np.int32(pattern)) * smallest)
        if pattern >= beyond:
            bits = after_beyond if pattern == beyond else not_a_number
        return _float_of(np.uint32(bits | sign))

    return decode


def _encoder(float8: _Float8):  # type: ignore[no-untyped-def]
    shift = np.uint32(23 - float8.mantissa)
    half_less_one = np.uint32((1 << (22 - float8.mantissa)) - 1)
    smallest_normal = np.float32(2.0 ** (1 - float8.bias))
    # The sum of this and a number has the number in its lowest bits, as a rounded multiple of the smallest step.
    aligner = np.float32(2.0 ** (24 - float8.bias - float8.mantissa))
    aligner_bits = np.uint32(np.float32(aligner).view(np.uint32))
    exponents_differ = np.uint32((127 - float8.bias) << float8.mantissa)
    largest = np.float32(float8.largest)

    def encode(value, carrier):  # type: ignore[no-untyped-def]
        sign = np.uint32(_bits_of(value) & np.uint32(0x80000000))
        size = _float_of(np.uint32(_bits_of(value) & np.uint32(0x7FFFFFFF)))
        size = largest if size > largest else size
        bits = _bits_of(size)
        rounded = np.uint32(np.uint32(bits + half_less_one) + np.uint32(np.uint32(bits >> shift) & np.uint32(1)))
        pattern = np.uint32(np.uint32(rounded >> shift) - exponents_differ)
        if size < smallest_normal:
            pattern = np.uint32(_bits_of(size + aligner) - aligner_bits)
        if value != value:
            pattern = np.uint32(0x7F)
        return np.uint8(np.uint32(np.uint32(sign >> np.uint32(24)) | pattern))

    return encode


def _encode_bfloat16(value, carrier):  # type: ignore[no-untyped-def]
    bits = _bits_of(value)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    if value != value:  # rounding the bits of NaN could carry into infinity
        rounded = np.uint32(bits | np.uint32(0x400000))
    return np.uint16(np.uint32(rounded >> np.uint32(16)))


_DECODERS = {
    types.uint32: lambda item: _float_of(item),
    types.int16: lambda item: _widen_half(item),
    types.uint16: lambda item: _float_of(np.uint32(item) << np.uint32(16)),
    types.uint8: _decoder(_E4M3),
    types.int8: _decoder(_E5M2),
}
_ENCODERS = {
    types.uint32: lambda value, carrier: _bits_of(value),
    types.int16: lambda value, carrier: _narrow_half(value),
    types.uint16: _encode_bfloat16,
    types.uint8: _encoder(_E4M3),
    types.int8: _encoder(_E5M2),
}


@overload(decode)
def _decode(item):  # type: ignore[no-untyped-def]
    return _DECODERS.get(item)


@overload(encode)
def _encode(value, carrier):  # type: ignore[no-untyped-def]
    return _ENCODERS.get(carrier)
