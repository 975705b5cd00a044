"""Copies KV with a device, and moves it: ``python -m blendhub.tools.doctor.device_child FD NAME OPTIONS``.

A small sibling of the conformance suite, which needs pytest.
"""

import sys
from typing import Any

import msgspec
import numpy as np
import torch

from blendhub.contracts import Device, PagedLayer, PageFormat, Rotation, Segment
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.framework.host import PluginHost

HEADS, WIDTH, BLOCK, CHUNK, N_BLOCKS = 2, 64, 16, 32, 16
TOKENS = 2 * CHUNK
SHIFT = 37
"""How far the copy is moved: not by whole blocks."""

POSITIONS = 256
FORMATS: tuple[PageFormat, ...] = ("packed_heads", "kv_first", "split")
DTYPES = ("bfloat16", "float16", "float32")


class DevicePages:
    """One layer's pages in a format that the device supports, and its keys and values as ``[blocks, tokens, ...]``."""

    def __init__(self, device: Device) -> None:
        formats = [one for one in FORMATS if one in device.formats]
        dtypes = [one for one in DTYPES if one in device.dtypes]
        if not formats or not dtypes:
            raise Unsupported(f"it supports {', '.join(device.formats)} of {', '.join(device.dtypes)}, no common pages")
        self.format, self.dtype = formats[0], dtypes[0]
        shape: tuple[int, ...] = (N_BLOCKS, HEADS, BLOCK, 2 * WIDTH)
        if self.format != "packed_heads":
            shape = (2, N_BLOCKS, BLOCK, HEADS, WIDTH)
        made = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, self.dtype))
        made = made.to(device.torch_type)
        self.tensors: tuple[torch.Tensor, ...] = (made,)
        if self.format == "split":
            self.tensors = (made[0].clone(), made[1].clone())

    def keys_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """On the host, of every position of every block: ``[blocks * tokens, heads, width]``."""
        here = [tensor.cpu() for tensor in self.tensors]
        if self.format == "packed_heads":
            by_token = here[0].transpose(1, 2)
            keys, values = by_token[..., :WIDTH], by_token[..., WIDTH:]
        else:
            keys, values = (here[0], here[1]) if self.format == "split" else (here[0][0], here[0][1])
        return keys.reshape(-1, HEADS, WIDTH), values.reshape(-1, HEADS, WIDTH)


def check(device: Device) -> str:
    """Save, load and move some tokens; returns what is wrong, or nothing."""
    pages = DevicePages(device)
    layout = KVLayout(layers=1, kv_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, dtype=pages.dtype, chunk_tokens=CHUNK)
    rotation = Rotation(_cos_sin().to(device.torch_type), neox=True)
    device.attach([PagedLayer("layer", pages.format, pages.tensors, rotation)], BLOCK, layout)
    device.pin(np.zeros(TOKENS // CHUNK * layout.shard_bytes, np.uint8))
    stored = np.arange(TOKENS // BLOCK, dtype=np.int64)[::-1].copy()
    others = np.arange(N_BLOCKS - 1, TOKENS // BLOCK - 1, -1, dtype=np.int64)
    keys, values = (part[_places(stored, 0)] for part in pages.keys_and_values())
    device.save(_segments(0, layout), stored).wait()
    for shift in (0, SHIFT):
        device.load(_segments(shift, layout), others).wait()
        got_keys, got_values = (part[_places(others, shift)] for part in pages.keys_and_values())
        if not torch.equal(got_values, values):
            return "values that were loaded differ from those that were saved"
        if not shift and not torch.equal(got_keys, keys):
            return "keys that were loaded where they were saved differ"
        wanted = _moved(keys.float(), shift)
        if (got_keys.float() - wanted).abs().max() > torch.finfo(keys.dtype).eps * wanted.abs().max():
            return "keys that were moved are rotated wrongly"
    return ""


def _cos_sin() -> torch.Tensor:
    angles = torch.outer(torch.arange(POSITIONS), _frequencies())
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _frequencies() -> torch.Tensor:
    return torch.pow(10_000.0, -torch.arange(WIDTH // 2) / (WIDTH // 2))


def _moved(keys: torch.Tensor, shift: int) -> torch.Tensor:
    cos, sin = (shift * _frequencies()).cos(), (shift * _frequencies()).sin()
    one, other = keys.chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def _segments(shift: int, layout: KVLayout) -> list[Segment]:
    return [
        Segment(Span(at + shift, at + shift + CHUNK), at // CHUNK * layout.shard_bytes, 0, at)
        for at in range(0, TOKENS, CHUNK)
    ]


def _places(blocks: Any, shift: int) -> torch.Tensor:
    """Where the tokens from position ``shift`` on are, counted through all blocks."""
    at = np.arange(shift, shift + TOKENS)
    return torch.from_numpy(blocks[at // BLOCK] * BLOCK + at % BLOCK)


def main() -> None:
    number, name, options = sys.argv[1:]
    device: Device = PluginHost.discover().create("device", name, msgspec.json.decode(options))
    try:
        wrong = check(device)
    finally:
        device.close()
    with open(int(number), "wb", buffering=0) as out:
        out.write(msgspec.json.encode({"wrong": wrong}) + b"\n")


if __name__ == "__main__":
    main()
