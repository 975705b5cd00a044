"""Rotation of keys with torch's operators."""

from typing import TypeAlias, cast

import torch

Angles: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``[tokens, 1, half]``, for all heads."""


def angles_between(old: torch.Tensor, new: torch.Tensor) -> Angles:
    """The angles from each token's old position to its new one; both are rows ``[tokens, width]`` of ``cos_sin``."""
    cos_old, sin_old = old[:, None].chunk(2, -1)
    cos_new, sin_new = new[:, None].chunk(2, -1)
    scale = cos_old * cos_old + sin_old * sin_old
    return (cos_new * cos_old + sin_new * sin_old) / scale, (sin_new * cos_old - cos_new * sin_old) / scale


def pairs_of(items: torch.Tensor, neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the two items of each pair of a key's rotated part."""
    pairs = items.chunk(2, -1) if neox else (items[..., ::2], items[..., 1::2])
    return cast("tuple[torch.Tensor, torch.Tensor]", pairs)
