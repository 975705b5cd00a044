"""The engine's pages as views: for each layer, keys and values as ``[blocks, tokens, heads, width]``."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from blendhub.contracts import PagedLayer, PageFormat, Rotation
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import check_pages, count_blocks, count_positions, planes_of

FORMATS: tuple[PageFormat, ...] = ("split", "kv_first", "latent")
"""vllm-ascend has ``split``. The others are those of vLLM that it may change to; packed pages do not occur."""

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The supported dtypes. KV of 8 bits comes with scales or in private layouts on NPUs."""

BITS = {2: torch.int16, 4: torch.int32}
"""Copies move items as integers, so that no conversion can change the bits of a NaN."""

MAX_SLOTS = 2**31
"""Operators count slots in 32 bits."""

BASE_FORMATS = (-1, 0, 1, 2, 30)
"""The numbers of torch_npu's formats whose memory is what torch's strides say: undefined, NCHW, NHWC, ND, NCDHW."""


class Planes(NamedTuple):
    """The pages of one layer."""

    keys: torch.Tensor
    values: torch.Tensor
    """The values; of width 0 if one vector is both key and value."""
    rotation: Rotation | None


class Pages(NamedTuple):
    layers: tuple[Planes, ...]
    n_blocks: int
    n_positions: int | None
    """The positions that every rotation table covers; None: no layer has a rotation."""
    place: torch.device


def read_pages(layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> Pages:
    """Check the layers against the layout, and view them alike."""
    if layout.dtype not in TYPES:
        raise Unsupported(
            f"device 'npu' does not support KV of {layout.dtype}; it supports {', '.join(TYPES)}: "
            "leave out --kv-cache-dtype, and serve a model without quantised KV"
        )
    place = check_pages(layers, block_size, layout, FORMATS)
    for layer in layers:
        for tensor in layer.tensors:
            _refuse_private_format(layer.name, tensor)
    n_blocks = count_blocks(layers)
    if n_blocks * block_size >= MAX_SLOTS:
        raise Unsupported(
            f"{n_blocks} blocks of {block_size} tokens are too many: device 'npu' numbers slots with 32 bits; "
            "lower --gpu-memory-utilization"
        )
    tables: dict[int, torch.Tensor] = {}
    return Pages(
        tuple(_planes(layer, block_size, layout, tables) for layer in layers), n_blocks, count_positions(layers), place
    )


def _planes(layer: PagedLayer, block_size: int, layout: KVLayout, tables: dict[int, torch.Tensor]) -> Planes:
    keys, values = (plane.transpose(1, 2) for plane in planes_of(layer, block_size, layout))
    rotation = layer.rotation
    if rotation is not None:
        # Layers that share a table also share its contiguous copy.
        table = tables.setdefault(id(rotation.cos_sin), rotation.cos_sin.contiguous())
        rotation = Rotation(table, rotation.neox, rotation.offset)
    return Planes(keys, values, rotation)


def _refuse_private_format(name: str, tensor: torch.Tensor) -> None:
    """An NPU may keep a tensor in fractal order (NZ), which no view of torch's describes."""
    if tensor.device.type != "npu":
        return
    number = torch.ops.npu.get_npu_format(tensor)
    if number not in BASE_FORMATS:
        raise Unsupported(
            f"layer {name!r} has pages in the private format {number} of torch_npu, which device 'npu' does not "
            "support; turn off enable_kv_nz (a 310P has no other format)"
        )


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's items as integers of their size."""
    return tensor.view(BITS[tensor.itemsize])
