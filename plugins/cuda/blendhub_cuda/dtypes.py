"""Conversions between a cache's items and float32, in kernels.

Integer arithmetic replaces Triton's own conversions where these differ between GPUs, or between a GPU and the
interpreter.
"""

import triton
import triton.language as tl

ITEM_TYPES = {4: tl.int32, 2: tl.int16, 1: tl.int8}
"""The integer type of each size, which kernels load and store."""


@triton.jit
def _decode_float8(bits, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BEYOND: tl.constexpr, AFTER_BEYOND: tl.constexpr):
    """``BEYOND`` is the first pattern after the largest number, and ``AFTER_BEYOND`` its bits as float32."""
    SMALLEST: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)
    wide = bits.to(tl.int32)
    pattern = wide & 0x7F
    size = (pattern << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    subnormal = (pattern.to(tl.float32) * SMALLEST).to(tl.int32, bitcast=True)
    size = tl.where(pattern < (1 << MANTISSA), subnormal, size)
    size = tl.where(pattern == BEYOND, AFTER_BEYOND, tl.where(pattern > BEYOND, 0x7FC00000, size))
    return (size | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_float8(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    SHIFT: tl.constexpr = 23 - MANTISSA
    # The sum of this and a number has the number in its lowest bits, as a rounded multiple of the smallest step.
    ALIGNER: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    ALIGNER_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    SMALLEST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.where(value < 0, -value, value)
    size = tl.where(size > LARGEST, LARGEST, size)
    size = tl.where(value == value, size, 0.0)
    bits = size.to(tl.int32, bitcast=True)
    rounded = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    pattern = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    subnormal = (size + ALIGNER).to(tl.int32, bitcast=True) - ALIGNER_BITS
    pattern = tl.where(size < SMALLEST_NORMAL, subnormal, pattern)
    pattern = tl.where(value == value, pattern, 0x7F)
    return (pattern | sign).to(tl.int8)


@triton.jit
def _encode_bfloat16(value):
    bits = value.to(tl.int32, bitcast=True)
    # Rounding the bits of NaN could carry into infinity.
    size = tl.where(value == value, bits & 0x7FFFFFFF, 0x7FC00000)
    rounded = (size + 0x7FFF + ((size >> 16) & 1)) >> 16
    return (rounded | ((bits >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def decode(bits, DTYPE: tl.constexpr):
    """The values of these items as float32."""
    if DTYPE == "float32":
        value = bits.to(tl.float32, bitcast=True)
    elif DTYPE == "float16":
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif DTYPE == "bfloat16":
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "float8_e4m3":
        value = _decode_float8(bits, 3, 7, 0x7F, 0x7FC00000)
    else:
        value = _decode_float8(bits, 2, 15, 0x7C, 0x7F800000)
    return value


@triton.jit
def encode(value, DTYPE: tl.constexpr):
    """Float32 numbers as items, rounded to nearest, ties to even. Values too large for 8 bits saturate.

    Otherwise rotating a large key could make it NaN, and with it all attention to that key.
    """
    if DTYPE == "float32":
        bits = value.to(tl.int32, bitcast=True)
    elif DTYPE == "float16":
        bits = value.to(tl.float16).to(tl.int16, bitcast=True)
    elif DTYPE == "bfloat16":
        bits = _encode_bfloat16(value)
    elif DTYPE == "float8_e4m3":
        bits = _encode_float8(value, 3, 7, 448.0)
    else:
        bits = _encode_float8(value, 2, 15, 57344.0)
    return bits
