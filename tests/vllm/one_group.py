"""The groups and pages of a model whose layers have one shape and one block table."""

from blendhub.vllm.model.layer_groups import LayerGroup, pages_of


def one_group(layout, block_size):
    """The groups of such a model."""
    return (LayerGroup(0, tuple(range(layout.layers)), layout, block_size, block_size, "packed_heads"),)


def pages_in(model, layout, block_size):
    """The pages of all its layers."""
    return pages_of(model, one_group(layout, block_size))
