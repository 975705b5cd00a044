"""The operators of torch_npu and vllm-ascend on a CPU, with the recorded schemas, and strict.

``define`` registers them with torch, so that the code for NPUs calls them as it would there. Whatever the operators'
documents do not allow raises: another dtype, gaps in memory, slots out of range or twice, an offset in a block.
"""

import ctypes

import torch
from blendhub_ascend.operators import SCHEMAS

_kept: list[torch.library.Library] = []


def define() -> None:
    """Once for a process."""
    if _kept:
        return
    for operator, kernel in KERNELS.items():
        namespace, schema = SCHEMAS[operator].split("::", 1)
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema)
        library.impl(schema.split("(")[0], kernel, "CPU")
        _kept.append(library)


def require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def check_rows(key, value, key_cache, value_cache):
    for one in (key, value, key_cache, value_cache):
        require(one.is_contiguous(), "operators take no tensors with gaps")
        require(one.dtype == key.dtype, "keys, values and both caches have one dtype")
    for one in (key, value):
        require(one.data_ptr() % 32 == 0, "operators want rows at addresses that are multiples of 32")
    require(key.dim() == 3 and key_cache.dim() == 4, "rows are [tokens, heads, width], caches have blocks before")
    require(key.shape[:2] == value.shape[:2], "keys and values have as many tokens and heads")
    for rows, cache in ((key, key_cache), (value, value_cache)):
        require(rows.shape[1:] == cache.shape[2:], "rows have the heads and the width of the cache")


def check_slots(slots, rows, cache):
    require(slots.is_contiguous() and slots.shape == rows.shape[:1], "there is one slot for each token")
    require(bool((slots < cache.shape[0] * cache.shape[1]).all()), "a slot is beyond the cache")
    require(len(slots[slots >= 0].unique()) == int((slots >= 0).sum()), "a slot is named twice")


def scatter(rows, cache, slots):
    cache.view(torch.int16).flatten(0, 1)[slots.long()] = rows.view(torch.int16)


def reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    check_rows(key, value, key_cache, value_cache)
    require(key.dtype in (torch.float16, torch.bfloat16), "ATB takes float16 and bfloat16")
    require(key.shape[2] % 16 == 0 and value.shape[2] % 16 == 0, "ATB wants heads of whole 32 bytes")
    require(slot_indices.dtype == torch.int32, "ATB wants slots of int32")
    require(slot_indices.data_ptr() % 32 == 0, "operators want addresses that are multiples of 32")
    check_slots(slot_indices, key, key_cache)
    kept = slot_indices >= 0
    for rows, cache in ((key, key_cache), (value, value_cache)):
        scatter(rows[kept], cache, slot_indices[kept])


def scatter_pa_kv_cache(
    key, value, key_cache, value_cache, slot_mapping, *, compress_lens=None, compress_seq_offsets=None, seq_lens=None,
    cache_mode="PA_NZ",
):  # fmt: skip
    check_rows(key, value, key_cache, value_cache)
    require(cache_mode in (None, "Norm"), f"pages in torch's order want cache_mode='Norm', not {cache_mode!r}")
    require(compress_lens is compress_seq_offsets is seq_lens is None, "these are for compressed caches")
    require(slot_mapping.dtype in (torch.int32, torch.int64), "slots are int32 or int64")
    require(bool((slot_mapping >= 0).all()), "a slot is before the cache")
    check_slots(slot_mapping, key, key_cache)
    scatter(key, key_cache, slot_mapping)
    scatter(value, value_cache, slot_mapping)


def gather_pa_kv_cache(
    key_cache, value_cache, block_tables, seq_lens, key, value, *, seq_offset=None, is_seq_lens_cumsum=False
):
    check_rows(key, value, key_cache, value_cache)
    size = key_cache.shape[1]
    for one in (block_tables, seq_lens, *([] if seq_offset is None else [seq_offset])):
        require(one.dtype == torch.int32 and one.is_contiguous(), "blocks, lengths and offsets are int32 without gaps")
    require(not is_seq_lens_cumsum, "lengths are one for each sequence")
    require(block_tables.dim() == 2 and len(block_tables) == len(seq_lens), "each sequence has a row of blocks")
    require(seq_offset is None or not (seq_offset % size).any(), "an offset within a block is rounded down by the NPU")
    require(int(seq_lens.sum()) == len(key), "the lengths add up to the rows")
    at = 0
    for number, length in enumerate(seq_lens.tolist()):
        first = 0 if seq_offset is None else int(seq_offset[number]) // size
        for token in range(length):
            row, column = first + token // size, token % size
            require(row < block_tables.shape[1], "a sequence is longer than its blocks")
            block = int(block_tables[number, row])
            require(0 <= block < len(key_cache), "a block is beyond the cache")
            for rows, cache in ((key, key_cache), (value, value_cache)):
                rows.view(torch.int16)[at] = cache.view(torch.int16)[block, column]
            at += 1


def swap_blocks_batch(x, y, z, direction):
    for one in (x, y, z):
        require(one.dtype == torch.int64 and one.dim() == 1 and one.shape == x.shape, "three lists of int64")
    require(direction in (0, 1, 2), f"invalid direction {direction}")
    for source, target, nbytes in zip(x.tolist(), y.tolist(), z.tolist(), strict=True):
        require(source % 64 == 0 and target % 64 == 0, "CANN wants addresses that are multiples of 64")
        ctypes.memmove(target, source, nbytes)


KERNELS = {
    "atb::_npu_reshape_and_cache": reshape_and_cache,
    "npu::npu_gather_pa_kv_cache": gather_pa_kv_cache,
    "npu::npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "_C_ascend::swap_blocks_batch": swap_blocks_batch,
}
