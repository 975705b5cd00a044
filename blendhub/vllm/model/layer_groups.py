"""The groups of a model's layers, as devices copy them: layers of one shape that share a block table."""

from collections.abc import Sequence
from typing import NamedTuple

from blendhub.contracts import Device, Rotation
from blendhub.core.layout import KVLayout
from blendhub.vllm.model.chosen import Blocks, pages_in
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.pages import LayerPages, paged_layer, shape_of


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

    def pages(self, blocks: Blocks) -> Blocks:
        """The pages of these blocks."""
        return pages_in(blocks, self.block_size // self.page_size)


def layer_groups(model: EngineModel, chunk_tokens: int) -> tuple[LayerGroup, ...]:
    """The groups, in the order of their first layers; raises Unsupported for pages that are not known."""
    members: dict[tuple[int, int, tuple[int, int, int, str]], list[int]] = {}
    for number, name in enumerate(model.layer_names):
        key = model.table_of(name), model.page_size_of(name), shape_of(model, number)
        members.setdefault(key, []).append(number)
    return tuple(
        LayerGroup(
            table,
            tuple(layers),
            KVLayout(
                layers=len(layers),
                kv_heads=heads,
                key_dim=key_dim,
                value_dim=value_dim,
                dtype=dtype,
                chunk_tokens=chunk_tokens,
            ),
            model.block_sizes[table],
            page_size,
        )
        for (table, page_size, (heads, key_dim, value_dim, dtype)), layers in members.items()
    )


def pages_of(
    model: EngineModel, groups: Sequence[LayerGroup], rotations: Sequence[Rotation | None] = ()
) -> list[LayerPages]:
    """The pages of all layers in the model's order. ``rotations``: one for each layer; empty: none is rotated."""
    found: dict[int, LayerPages] = {}
    for group in groups:
        for number in group.layers:
            layer = paged_layer(model, number, rotations[number] if rotations else None)
            found[number] = LayerPages(layer, group.layout, group.page_size)
    return [found[number] for number in sorted(found)]


def attach(device: Device, groups: Sequence[LayerGroup], layers: Sequence[LayerPages]) -> None:
    """Attach a device to all groups."""
    for group in groups:
        device.attach([layers[number].paged for number in group.layers], group.page_size, group.layout)
