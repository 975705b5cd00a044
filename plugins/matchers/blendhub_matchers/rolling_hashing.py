"""Rolling hashes of windows of 32 tokens, modulo 2**61 - 1, and the tags made of them."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

PAGE = 32
MODULUS = (1 << 61) - 1

inlined = njit(nogil=True)
"""A decorator for functions that kernels call: kernels' cache entries on disk include them, so they have none."""


@intrinsic
def multiply_fold(typing_context, a, b):
    """``a * b`` modulo 2**61 - 1, not fully reduced: below 2**62 for factors below 2**61."""

    def generate(context, builder, signature, arguments):
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(factor, wide) for factor in arguments))
        low = builder.trunc(builder.and_(product, wide(MODULUS)), word)
        return builder.add(low, builder.trunc(builder.lshr(product, wide(61)), word))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def prefetch(typing_context, array, place):
    """Fetch a place of an array into the cache, so that its memory need not be waited for later."""

    def generate(context, builder, signature, arguments):
        kind, where = signature.args[0], arguments[1]
        indices = [where] + [where.type(0)] * (kind.ndim - 1)
        data = context.make_array(kind)(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, kind, data, indices)
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        takes = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, takes, "llvm.prefetch.p0")
        builder.call(function, [builder.bitcast(address, byte), flag(0), flag(3), flag(1)])  # to read, often, data
        return context.get_dummy_value()

    return types.void(array, place), generate


@inlined
def reduce(value):
    value = (value & np.uint64(MODULUS)) + (value >> np.uint64(61))
    return value - np.uint64(MODULUS) if value >= np.uint64(MODULUS) else value


@inlined
def tag_of(value, tag_mask):
    """32 well-mixed bits of a window's hash."""
    return ((value * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & tag_mask


@inlined
def power(base, exponent):
    result = np.uint64(1)
    for _ in range(exponent):
        result = reduce(multiply_fold(result, base))
    return result


@inlined
def appended(value, token, base):
    """The hash of a sequence with one more token, not reduced. A token counts one more, so that leading zeros do."""
    return multiply_fold(value, base) + np.uint64(token) + np.uint64(1)


@inlined
def hash_of(tokens, start, end, base):
    value = np.uint64(0)
    for at in range(start, end):
        value = reduce(appended(value, tokens[at], base))
    return value


@inlined
def hash_windows(prompt, base, leaving, tag_mask, homes, first, value, tags):
    """The tags of the windows from ``first`` on, as many as ``tags`` has places for.

    ``value`` is the hash of the first window without its last token; returned is that of the window behind the last.
    """
    last = np.uint64(homes.size - 1)
    for k in range(tags.size):
        value = appended(value, prompt[first + k + PAGE - 1], base)
        tag = tag_of(reduce(value), tag_mask)
        tags[k] = tag
        # The next hash waits for this one; memory that arrives meanwhile costs nothing.
        prefetch(homes, np.int64(tag & last))
        gone = reduce(multiply_fold(np.uint64(prompt[first + k]) + np.uint64(1), leaving))
        value = reduce(value + np.uint64(MODULUS) - gone)
    return value
