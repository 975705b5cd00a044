"""Beyond the conformance suite: every number of each dtype, odd sizes and addresses, Numba's disk cache."""

import numpy as np
import pytest
import torch
from blendhub_cpu import kernels
from blendhub_cpu.dtypes import CARRIERS, decode, encode
from blendhub_cpu.memory import transpose
from numba import njit

TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
FLOAT8 = ["float8_e4m3", "float8_e5m2"]


@njit
def decode_all(items, numbers):
    for index in range(items.size):
        numbers[index] = decode(items[index])


@njit
def encode_all(numbers, items):
    for index in range(items.size):
        items[index] = encode(numbers[index], items[0])


def decoded(items, dtype):
    numbers = np.empty(items.size, np.float32)
    decode_all(items.view(CARRIERS[dtype]), numbers)
    return numbers


def encoded(numbers, dtype):
    items = np.empty(numbers.size, CARRIERS[dtype])
    encode_all(numbers, items)
    return items.view(np.dtype(f"u{items.itemsize}"))


def patterns(dtype):
    """All bit patterns; of float32 a million random ones."""
    size = CARRIERS[dtype].itemsize
    if size == 4:
        return np.random.default_rng(1).integers(0, 2**32, 2**20, np.uint32)
    return np.arange(2 ** (8 * size), dtype=np.dtype(f"u{size}"))


def by_torch(items, dtype):
    signed = items.view(np.dtype(f"i{items.itemsize}"))
    return torch.from_numpy(signed.copy()).view(TYPES[dtype]).float().numpy()


@pytest.mark.parametrize("dtype", TYPES)
def test_every_pattern_is_decoded_as_torch_does(dtype):
    items = patterns(dtype)
    np.testing.assert_array_equal(decoded(items, dtype), by_torch(items, dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_and_encoding_returns_the_same_bits(dtype):
    items = patterns(dtype)
    numbers = by_torch(items, dtype)
    known = np.isfinite(numbers) if dtype in FLOAT8 else ~np.isnan(numbers)
    np.testing.assert_array_equal(encoded(numbers[known], dtype), items[known])


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_rounded_as_torch_does(dtype):
    """Midpoints of all neighbouring numbers, values next to them, and values out of range."""
    exact = by_torch(patterns(dtype), dtype)
    exact = np.unique(exact[np.isfinite(exact)]).astype(np.float64)
    middles = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    numbers = np.concatenate(
        [exact, middles, np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))]
    ).astype(np.float32)
    wanted = torch.from_numpy(numbers).to(TYPES[dtype]).float().numpy()
    np.testing.assert_array_equal(by_torch(encoded(numbers, dtype), dtype), wanted)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_values_too_large_for_8_bits_saturate(dtype):
    largest = torch.finfo(TYPES[dtype]).max
    numbers = np.array([largest * 1.2, -largest * 1.2, 1e30, -1e30, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(by_torch(encoded(numbers, dtype), dtype), np.sign(numbers) * largest)


@pytest.mark.parametrize("dtype", TYPES)
def test_nan_stays_nan(dtype):
    numbers = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(by_torch(encoded(numbers, dtype), dtype)).all()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (8, 8), (16, 16), (7, 33), (32, 64), (17, 5), (1, 20), (20, 1)])
@pytest.mark.parametrize("carrier", [np.uint8, np.uint16, np.uint32])
def test_transposing(carrier, shape, offset):
    """Any shape at any address; bytes around the target stay as they are."""
    size = np.dtype(carrier).itemsize
    n_rows, n_columns = shape
    random = np.random.default_rng(1)
    source = random.integers(0, 256, (n_rows, n_columns * size + 3), np.uint8)
    target = random.integers(0, 256, (n_columns, n_rows * size + 5), np.uint8)
    wanted = target.copy()
    items = source[:, offset : offset + n_columns * size].copy().view(carrier)
    wanted[:, offset : offset + n_rows * size] = items.T.copy().view(np.uint8)
    transpose(
        target.ctypes.data + offset,
        target.strides[0],
        source.ctypes.data + offset,
        source.strides[0],
        n_rows,
        n_columns,
        np.empty(1, carrier),
    )
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("kernel", [kernels.rows_to_pages, kernels.pages_to_rows], ids=["load", "save"])
def test_the_disk_cache_depends_on_all_sources(kernel):
    """Numba itself checks only the file that defines the kernel."""
    closed_over = [cell.cell_contents for cell in kernel.py_func.__closure__]
    assert kernels._digest_of_sources() in closed_over
