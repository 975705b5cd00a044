"""Every number of each dtype, converted by kernels and by torch."""

import os
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from blendhub_cuda.dtypes import decode, encode

from blendhub.devices import torch_type

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
TYPES = ["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
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
    padded = torch.nn.functional.pad(given, (0, -len(given) % count)).to(DEVICE)
    result = torch.empty(len(padded), dtype=made, device=DEVICE)
    with np.errstate(all="ignore"):
        kernel[(len(padded) // count,)](padded, result, dtype, count)
    return result.cpu()[: len(given)]


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_decoded_and_rounded_as_torch_does(dtype):
    """All bit patterns, of float32 a million random ones; midpoints of all neighbouring numbers, values next to them,
    and NaN, which stays NaN. Values too large for 8 bits saturate."""
    kind = torch_type(dtype)
    bits, signed = 8 * kind.itemsize, SIGNED[kind.itemsize]
    patterns = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(signed) if bits < 32 else random_patterns()
    exact = patterns.view(kind).float()
    np.testing.assert_array_equal(run(decode_all, patterns, torch.float32, dtype), exact)
    known = exact.isfinite() if bits == 8 else ~exact.isnan()
    np.testing.assert_array_equal(run(encode_all, exact[known], signed, dtype), patterns[known])

    all_numbers = np.unique(exact[exact.isfinite()].numpy()).astype(np.float64)
    middles = ((all_numbers[1:] + all_numbers[:-1]) / 2).astype(np.float32)
    above, below = np.nextafter(middles, np.float32(np.inf)), np.nextafter(middles, np.float32(-np.inf))
    no_numbers = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    numbers = torch.from_numpy(np.concatenate([all_numbers.astype(np.float32), middles, above, below, no_numbers]))
    found = run(encode_all, numbers, signed, dtype).view(kind).float()
    np.testing.assert_array_equal(found, numbers.to(kind).float())
    if bits == 8:
        largest = torch.finfo(kind).max
        numbers = torch.tensor([largest * 1.2, -largest * 1.2, 1e30, -1e30, torch.inf, -torch.inf])
        found = run(encode_all, numbers, signed, dtype).view(kind).float()
        np.testing.assert_array_equal(found, numbers.sign() * largest)


def random_patterns():
    return torch.from_numpy(np.random.default_rng(1).integers(-(2**31), 2**31, 2**20, np.int32))
