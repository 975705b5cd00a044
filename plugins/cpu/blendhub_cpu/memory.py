"""Compiled copies and transposes by address. Strides are in bytes."""

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

device_function = njit(nogil=True)
"""A decorator for functions that kernels call: Numba caches them with the kernel, not separately."""


@intrinsic
def pointer(typing_context, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def copy_bytes(typing_context, target, source, nbytes):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [byte, byte, word, ir.IntType(1)])
        name = "llvm.memcpy.p0.p0.i64"
        function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        target, source, nbytes = arguments
        builder.call(
            function, [builder.inttoptr(target, byte), builder.inttoptr(source, byte), nbytes, ir.IntType(1)(0)]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _transpose_tile(typing_context, target, target_stride, source, source_stride, item):  # type: ignore[no-untyped-def]
    """A square tile of 16 bytes of items a side: row i of the source becomes column i of the target."""
    size = item.bitwidth // 8

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        target, target_stride, source, source_stride, _ = arguments
        word, n = ir.IntType(64), 16 // size
        vector = ir.VectorType(ir.IntType(8 * size), n).as_pointer()

        def at(start, stride, index):  # type: ignore[no-untyped-def]
            return builder.inttoptr(builder.add(start, builder.mul(stride, word(index))), vector)

        def interleave(one, other, first):  # type: ignore[no-untyped-def]
            order = [item for index in range(first, first + n // 2) for item in (index, index + n)]
            return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(ir.IntType(32), n), order))

        rows = [builder.load(at(source, source_stride, index), align=1) for index in range(n)]
        for _stage in range(n.bit_length() - 1):
            pairs = zip(rows[: n // 2], rows[n // 2 :], strict=True)
            rows = [interleave(one, other, first) for one, other in pairs for first in (0, n // 2)]
        for index, row in enumerate(rows):
            builder.store(row, at(target, target_stride, index), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, item), generate


@device_function
def transpose(target, target_stride, source, source_stride, n_rows, n_columns, items):
    """Row r, column c of the source becomes row c, column r of the target. Items of a row are contiguous."""
    size = items.itemsize
    n = 16 // size
    whole_rows, whole_columns = n_rows // n * n, n_columns // n * n
    for row in range(0, whole_rows, n):
        for column in range(0, whole_columns, n):
            _transpose_tile(
                target + column * target_stride + row * size,
                target_stride,
                source + row * source_stride + column * size,
                source_stride,
                items[0],
            )
    for row in range(n_rows):
        read = carray(pointer(source + row * source_stride), n_columns, items.dtype)
        for column in range(0 if row >= whole_rows else whole_columns, n_columns):
            carray(pointer(target + column * target_stride), n_rows, items.dtype)[row] = read[column]


@device_function
def copy_rows(target, target_stride, source, source_stride, count, nbytes):
    if target_stride == nbytes and source_stride == nbytes:
        copy_bytes(target, source, count * nbytes)
        return
    for index in range(count):
        copy_bytes(target + index * target_stride, source + index * source_stride, nbytes)
