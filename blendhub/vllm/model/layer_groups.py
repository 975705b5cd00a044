"""The groups of a model's layers, as devices copy them: layers of one shape that share a block table.

Recurrent layers have groups of their own. With its prefix cache, vLLM keeps some of their states (``mamba_cache_mode``
``align``): a block of theirs holds the state behind its last token, or none. To a device, the rows of a state are the
tokens of a block.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from blendhub.contracts import Device, PagedLayer, PageFormat, Rotation
from blendhub.core.layout import KVLayout, section_starts
from blendhub.vllm.model.engine_model import EngineModel, GroupAttention
from blendhub.vllm.model.page_trial import misplaced
from blendhub.vllm.model.pages import BYTES, LayerPages, possible_pages, shape_of, state_bytes
from blendhub.vllm.model.recompute_set import Blocks, pages_in

LEAST_BYTES = 2**24
"""A group with less of a chunk is not split: the bus brings that much while the host submits two batches of a load."""


class LayerGroup(NamedTuple):
    """A group of layers, which has a section in each shard."""

    table: int
    """The number of the block table, of those that vLLM keeps for a request."""
    layers: tuple[int, ...]
    """The numbers of the layers in the model's order."""
    layout: KVLayout
    block_size: int
    """The tokens of a block, as vLLM counts."""
    page_size: int
    """The tokens of a page: attention kernels may keep a block in several pages."""
    format: PageFormat
    at: int = 0
    """Where its section begins in a shard."""
    is_probed: bool = True
    """Whether probes may read its layers."""

    def pages(self, blocks: Blocks) -> Blocks:
        """The pages of these blocks."""
        return pages_in(blocks, self.block_size // self.page_size)


class StateGroup(NamedTuple):
    """A group of recurrent layers, which has a section in each state."""

    table: int
    """The number of the block table, of those that vLLM keeps for a request."""
    layers: tuple[PagedLayer, ...]
    layout: KVLayout
    """Its ``chunk_tokens`` are the rows of a state."""
    at: int = 0
    """Where its section begins in a state."""


def layer_groups(model: EngineModel, chunk_tokens: int) -> tuple[LayerGroup, ...]:
    """The groups, in the order of their first layers; raises Unsupported for pages that are not known."""
    members: dict[tuple[int, int, KVLayout, PageFormat], list[int]] = {}
    for number, name in enumerate(model.layer_names):
        heads, key_dim, value_dim, dtype = shape_of(model, number)
        layout = KVLayout(
            layers=1, kv_heads=heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype, chunk_tokens=chunk_tokens
        )
        key = model.tables[name], model.page_sizes[name], layout, _format_of(model, number, layout)
        members.setdefault(key, []).append(number)
    groups = [
        LayerGroup(
            table, tuple(layers), replace(layout, layers=len(layers)), model.block_sizes[table], page_size, format
        )
        for (table, page_size, layout, format), layers in members.items()
    ]
    starts = section_starts([group.layout for group in groups])
    return tuple(group._replace(at=at) for group, at in zip(groups, starts, strict=True))


def state_groups(model: EngineModel, chunk_tokens: int) -> tuple[StateGroup, ...]:
    """The groups of recurrent layers; raises Unsupported for states that lie otherwise than expected.

    A state is cut into as many rows as it may have, ``chunk_tokens``: devices copy many narrow rows at a time.
    """
    most = 1 << chunk_tokens.bit_length() - 1
    members: dict[tuple[int, KVLayout], list[PagedLayer]] = {}
    for name, (table, spec) in model.recurrent.items():
        pages = state_bytes(name, model.layer(name).kv_cache, spec.shapes)
        n_bytes = pages.shape[1]
        rows = math.gcd(n_bytes, most)
        width = n_bytes // rows
        layout = KVLayout(layers=1, kv_heads=1, key_dim=width, value_dim=0, dtype=BYTES, chunk_tokens=rows)
        members.setdefault((table, layout), []).append(PagedLayer(name, "latent", (pages.view(-1, rows, width),)))
    groups = [
        StateGroup(table, tuple(layers), replace(layout, layers=len(layers)))
        for (table, layout), layers in members.items()
    ]
    starts = section_starts([group.layout for group in groups])
    return tuple(group._replace(at=at) for group, at in zip(groups, starts, strict=True))


def split(groups: Sequence[LayerGroup], n_probed: int) -> tuple[LayerGroup, ...]:
    """The groups, cut behind the first layers of the model, as many as probes read. These come first, so that a probe
    begins while the others are copied. What is stored stays the same."""
    parts: list[LayerGroup] = []
    for is_probed in (True, False):
        for group in groups:
            n = sum(layer < n_probed for layer in group.layers)
            if n and group.layout.shard_bytes < LEAST_BYTES:
                n = len(group.layers)
            first, end = (0, n) if is_probed else (n, len(group.layers))
            if first < end:
                layout, at = replace(group.layout, layers=end - first), group.at + group.layout.keys_at(first)
                part = group._replace(layers=group.layers[first:end], layout=layout, at=at, is_probed=is_probed)
                parts.append(part)
    return tuple(parts)


def _format_of(model: EngineModel, number: int, layout: KVLayout) -> PageFormat:
    """The format in which a layer's KV is found. If it is found in none, the start-up check says so on all ranks."""
    possible = possible_pages(model, number)
    if len(possible) == 1:
        return next(iter(possible))
    page_size = model.page_sizes[model.layer_names[number]]
    for format, pages in possible.items():
        # What raises here raises in the start-up check, too.
        with suppress(Exception):
            if not misplaced(model, number, LayerPages(pages, layout, page_size)):
                return format
    return "packed_heads"


def pages_of(
    model: EngineModel, groups: Sequence[LayerGroup], rotations: Sequence[Rotation | None] = ()
) -> list[LayerPages]:
    """The pages of all layers in the model's order. ``rotations``: one for each layer; empty: none is rotated."""
    layers: dict[int, LayerPages] = {}
    for group in groups:
        for number in group.layers:
            pages = possible_pages(model, number)[group.format]
            if rotations:
                pages = replace(pages, rotation=rotations[number])
            layers[number] = LayerPages(pages, group.layout, group.page_size)
    return [layers[number] for number in sorted(layers)]


def attach(
    device: Device, groups: Sequence[LayerGroup], layers: Sequence[LayerPages], states: Sequence[StateGroup] = ()
) -> None:
    """Attach a device to all groups, those of recurrent layers last."""
    for group in groups:
        device.attach([layers[number].paged for number in group.layers], group.page_size, group.layout)
    for state in states:
        device.attach(state.layers, state.layout.chunk_tokens, state.layout)


def attention_of(device: Device, groups: Sequence[LayerGroup], model: EngineModel) -> list[GroupAttention]:
    """The attention of a device that is attached to all groups; empty if it lacks that of a group."""
    rules = model.rules()
    over_groups: list[GroupAttention] = []
    for number, group in enumerate(groups):
        attention = device.attention([rules[layer] for layer in group.layers], model.dtype, number)
        if attention is None:
            return []
        over_groups.append(GroupAttention([model.layer_names[layer] for layer in group.layers], attention))
    return over_groups
