"""The states of recurrent layers, as devices copy them: the rows of a page, one page for each state that vLLM keeps."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from blendhub.contracts import Device, PagedLayer
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.vllm.model.engine_model import EngineModel

MOST_ROWS = 64
"""The most rows that a state is cut into: devices copy rows, of bounded width."""


class StateGroup(NamedTuple):
    """Recurrent layers whose states have one size, and which share a block table."""

    table: int
    block_size: int
    """A block holds the state behind so many tokens, or none."""
    layers: tuple[PagedLayer, ...]
    layout: KVLayout
    """Its ``chunk_tokens`` are the rows of a state."""


def state_groups(model: EngineModel, chunk_tokens: int) -> tuple[StateGroup, ...]:
    """The groups of a model's recurrent layers; raises Unsupported for states that lie otherwise than expected."""
    found: dict[tuple[int, int], list[PagedLayer]] = {}
    for name, table in model.recurrent.items():
        pages = _bytes_of(name, model.layer(name).kv_cache)
        most = 1 << min(MOST_ROWS, chunk_tokens).bit_length() - 1
        rows = pages.view(len(pages), math.gcd(pages.shape[1], most), -1)
        found.setdefault((table, pages.shape[1]), []).append(PagedLayer(name, "latent", (rows,)))
    groups = [
        StateGroup(table, model.block_sizes[table], tuple(layers), _layout(layers))
        for (table, _), layers in found.items()
    ]
    # Devices take no group with longer chunks than the first one, which these are where no layer keeps KV.
    return tuple(sorted(groups, key=lambda group: -group.layout.chunk_tokens))


def tokens_only(chunk_tokens: int) -> KVLayout:
    """The layout of a model that has recurrent layers only: of a token it keeps a byte, which says nothing.

    So its texts are found as those of other models are, and evicted with less than a state.
    """
    return KVLayout(layers=1, kv_heads=1, key_dim=1, value_dim=0, dtype="int8", chunk_tokens=chunk_tokens)


def attach_states(device: Device, groups: Sequence[StateGroup]) -> None:
    """Attach a device to all groups of recurrent layers, behind the other groups of layers."""
    for group in groups:
        device.attach(group.layers, group.layout.chunk_tokens, group.layout)


def _layout(layers: Sequence[PagedLayer]) -> KVLayout:
    _, rows, width = layers[0].tensors[0].shape
    return KVLayout(layers=len(layers), kv_heads=1, key_dim=width, value_dim=0, dtype="int8", chunk_tokens=rows)


def _bytes_of(name: str, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """All states of a layer as bytes ``[blocks, n]``: in a block of vLLM's they follow each other."""
    first = states[0]
    stride = first.stride(0) * first.element_size()
    start = first.storage_offset() * first.element_size()
    n = 0
    for state in states:
        one = state[0]
        follows = state.storage_offset() * state.element_size() == start + n
        if not (follows and one.is_contiguous() and state.stride(0) * state.element_size() == stride):
            raise Unsupported(f"{name} keeps its state in tensors that do not follow each other in a block")
        n += one.numel() * one.element_size()
    flat = torch.empty(0, dtype=torch.int8, device=first.device).set_(first.untyped_storage())
    return flat.as_strided((len(first), n), (stride, 1), start)
