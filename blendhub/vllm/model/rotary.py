"""The model's rotary embeddings as tables, and the rotation of keys by them."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from blendhub.contracts import Rotation


def rotations_of(module: torch.nn.Module, key_width: int, n_positions: int) -> list[Rotation]:
    """The candidates for the rotation of keys: the table of each rotary module, in both pairings.

    What a module says of its pairing holds for the queries and keys that it is given; the pages of MLA on Ascend NPUs
    have them in another order. Tables have at most ``n_positions`` rows, and only those that differ go to the device.
    """
    rotations: dict[str, Rotation] = {}
    for part in module.modules():
        if not isinstance(part, RotaryEmbeddingBase):
            continue
        table = _table(part, n_positions)
        if table is None or table.shape[-1] > key_width:
            continue
        # Only a joint latent (MLA) has the rotated part of a key at its end.
        offset = key_width - table.shape[-1] if getattr(part, "head_size", key_width) < key_width else 0
        both = [Rotation(table, neox, offset) for neox in (bool(part.is_neox_style), not part.is_neox_style)]
        new = {digest(rotation): rotation for rotation in both if digest(rotation) not in rotations}
        if new:
            placed = table.to(next((buffer.device for buffer in part.buffers()), table.device))
            rotations |= {name: Rotation(placed, rotation.neox, rotation.offset) for name, rotation in new.items()}
    return list(rotations.values())


def digest(rotation: Rotation | None) -> str:
    """A name of a rotation that is the same in every process, however long its table is."""
    if rotation is None:
        return "none"
    # A row is the one before it rotated further, so the first rows have all angles, and their scale.
    rows = rotation.cos_sin[:64].cpu().contiguous()
    shape = f"{rows.shape[1]} {rotation.neox} {rotation.offset} ".encode()
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


def _table(part: Any, n_positions: int) -> torch.Tensor | None:
    """The cosines and sines in float32, in memory of the CPU: the module itself may keep them rounded."""
    try:
        with torch.device("cpu"), _for_positions(part, n_positions):
            table = part._compute_cos_sin_cache()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    if not isinstance(table, torch.Tensor) or table.dim() != 2:
        return None
    # A copy: a view would keep all rows in memory.
    return table.float().cpu()[:n_positions].clone()


@contextmanager
def _for_positions(part: Any, n: int) -> Iterator[None]:
    """Have the module compute at most ``n`` rows, if its rows do not depend on how many there are.

    For ten million positions vLLM's own function takes ten GiB on each rank.
    """
    n_known = getattr(part, "max_position_embeddings", 0)
    if type(part)._compute_cos_sin_cache is not RotaryEmbeddingBase._compute_cos_sin_cache or n_known <= n:
        yield
        return
    frequencies = part._compute_inv_freq(part.base)
    part.max_position_embeddings = n
    try:
        if not torch.equal(frequencies, part._compute_inv_freq(part.base)):
            part.max_position_embeddings = n_known
        yield
    finally:
        part.max_position_embeddings = n_known
