"""Every number of each dtype, converted by kernels and by torch."""

import os
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from blendhub_cuda.dtypes import decode, encode

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def like_kernels(function):
    """Compiled on a GPU, else run by the interpreter, as the device's kernels are."""
    with mock.patch.dict(os.environ, {} if HAS_GPU else {"TRITON_INTERPRET": "1"}):
        return triton.jit(function)


@like_kernels
def decode_all(items, numbers, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(numbers + at, decode(tl.load(items + at), DTYPE))


@like_kernels
def encode_all(numbers, items, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(items + at, encode(tl.load(numbers + at), DTYPE))


def run(kernel, given, made, dtype):
    """The kernel's result of dtype ``made``. The input is padded, because the kernel has no mask."""
    count = min(65536, triton.next_power_of_2(len(given)))
    rest = -len(given) % count
    given = torch.nn.functional.pad(given, (0, rest)).to(DEVICE)
    result = torch.empty(len(given), dtype=made, device=DEVICE)
    with np.errstate(all="ignore"):
        kernel[(len(given) // count,)](given, result, dtype, count)
    return result.cpu()[: len(given) - rest]


def encoded(numbers, dtype):
    return run(encode_all, numbers, SIGNED[TYPES[dtype].itemsize], dtype)


def patterns(dtype):
    """All bit patterns; of float32 a million random ones."""
    size = TYPES[dtype].itemsize
    if size == 4:
        return torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, 2**20, np.int32))
    return torch.arange(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1)).to(SIGNED[size])


def by_torch(items, dtype):
    return items.view(TYPES[dtype]).float()


def equal(found, wanted):
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())


@pytest.mark.parametrize("dtype", TYPES)
def test_every_pattern_is_decoded_as_torch_does_and_encoded_again(dtype):
    items = patterns(dtype)
    numbers = by_torch(items, dtype)
    equal(run(decode_all, items, torch.float32, dtype), numbers)
    known = numbers.isfinite() if "float8" in dtype else ~numbers.isnan()
    equal(encoded(numbers[known], dtype), items[known])


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_rounded_as_torch_does(dtype):
    """Midpoints of all neighbouring numbers, values next to them, and NaN, which stays NaN."""
    exact = by_torch(patterns(dtype), dtype)
    exact = np.unique(exact[exact.isfinite()].numpy()).astype(np.float64)
    middles = ((exact[1:] + exact[:-1]) / 2).astype(np.float32)
    above, below = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))
    no_numbers = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    numbers = torch.from_numpy(np.concatenate([exact.astype(np.float32), middles, above, below, no_numbers]))
    equal(by_torch(encoded(numbers, dtype), dtype), numbers.to(TYPES[dtype]).float())


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_values_too_large_for_8_bits_saturate(dtype):
    largest = torch.finfo(TYPES[dtype]).max
    numbers = torch.tensor([largest * 1.2, -largest * 1.2, 1e30, -1e30, torch.inf, -torch.inf])
    equal(by_torch(encoded(numbers, dtype), dtype), numbers.sign() * largest)
