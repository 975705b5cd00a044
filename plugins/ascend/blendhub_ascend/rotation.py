"""Rotates keys in staging, in float32, with torch alone."""

from typing import NamedTuple

import torch

from blendhub.contracts import Rotation


class Angles(NamedTuple):
    """The angles from each token's old position to its new one: ``[tokens, 1, half]``, for all heads."""

    cos: torch.Tensor
    sin: torch.Tensor


def angles_between(table: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> Angles:
    cos_old, sin_old = table.index_select(0, old).chunk(2, 1)
    cos_new, sin_new = table.index_select(0, new).chunk(2, 1)
    square = cos_old * cos_old + sin_old * sin_old
    cos = (cos_new * cos_old + sin_new * sin_old) / square
    sin = (sin_new * cos_old - cos_new * sin_old) / square
    return Angles(cos[:, None], sin[:, None])


def rotate(keys: torch.Tensor, rotation: Rotation, angles: Angles) -> None:
    """Rotate keys ``[..., tokens, heads, width]`` in place; items outside the rotated part stay as they are."""
    part = keys[..., rotation.offset : rotation.offset + rotation.cos_sin.shape[1]]
    one, other = part.chunk(2, -1) if rotation.neox else (part[..., 0::2], part[..., 1::2])
    # Views of the keys themselves if these are float32, so nothing is written before all is computed.
    first, second = one.float(), other.float()
    first, second = first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin
    one.copy_(first)
    other.copy_(second)
