"""The model's rotary embeddings as tables, and the rotation of keys by them."""

from hashlib import blake2b
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from blendhub.contracts import Rotation


def rotations_of(module: torch.nn.Module, key_width: int) -> list[Rotation]:
    """The candidates for the rotation of keys: the table of each rotary module, in both pairings.

    What a module says of its pairing holds for the queries and keys that it is given; the pages of MLA on Ascend NPUs
    have them in another order.
    """
    found: dict[str, Rotation] = {}
    for part in module.modules():
        if not isinstance(part, RotaryEmbeddingBase):
            continue
        table = _table(part)
        if table is None or table.shape[-1] > key_width:
            continue
        for neox in (bool(part.is_neox_style), not part.is_neox_style):
            rotation = Rotation(table, neox, _offset(part, key_width, table.shape[-1]))
            found.setdefault(digest(rotation), rotation)
    return list(found.values())


def digest(rotation: Rotation | None) -> str:
    """A name of a rotation that is the same in every process."""
    if rotation is None:
        return "none"
    table = rotation.cos_sin.cpu().contiguous()
    shape = f"{tuple(table.shape)} {rotation.neox} {rotation.offset} ".encode()
    # A stretched table differs everywhere, so its first rows and a sample of the others identify it.
    rows = torch.cat([table[:64], table[:: max(1, len(table) // 64)]]).contiguous()
    return blake2b(shape + rows.numpy().tobytes(), digest_size=8).hexdigest()


def rotated(keys: torch.Tensor, rotation: Rotation | None, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Keys ``[n, heads, width]`` of positions ``old`` as they would be at ``new``, in float32."""
    result = keys.to(torch.float32, copy=True)
    if rotation is None:
        return result
    table = rotation.cos_sin
    cos_old, sin_old = table[old.to(table.device)].chunk(2, -1)
    cos_new, sin_new = table[new.to(table.device)].chunk(2, -1)
    scale = cos_old * cos_old + sin_old * sin_old
    cos = ((cos_new * cos_old + sin_new * sin_old) / scale)[:, None]
    sin = ((sin_new * cos_old - cos_new * sin_old) / scale)[:, None]
    width = table.shape[-1]
    part = result[..., rotation.offset : rotation.offset + width]
    first, second = part.chunk(2, -1) if rotation.neox else (part[..., ::2], part[..., 1::2])
    pair = first * cos - second * sin, second * cos + first * sin
    part.copy_(torch.cat(pair, -1) if rotation.neox else torch.stack(pair, -1).flatten(-2))
    return result


def _table(part: Any) -> torch.Tensor | None:
    """The cosines and sines in float32: the module itself may keep them rounded."""
    try:
        table = part._compute_cos_sin_cache()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    if not isinstance(table, torch.Tensor) or table.dim() != 2:
        return None
    device = next((buffer.device for buffer in part.buffers()), torch.device("cpu"))
    return table.float().to(device)


def _offset(part: Any, key_width: int, width: int) -> int:
    """Where the rotated part of a key begins: only a joint latent (MLA) has it at the end."""
    return key_width - width if getattr(part, "head_size", key_width) < key_width else 0
