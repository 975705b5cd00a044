"""How vLLM's attention backends lay out their pages, and the tokens of a page as plain tensors."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from blendhub.contracts import PagedLayer, PageFormat
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.core.spans import Span
from blendhub.devices import planes_of, rows_at
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.platform import Tensors, keeps_index_keys, keeps_latent
from blendhub.vllm.model.recompute_set import Blocks, pages_in

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
    torch.uint8: "int8",
}
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SPLIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMATS_OF_CPUS: tuple[PageFormat, ...] = ("packed_transposed", "packed_tiles")
"""What pages ``[blocks, heads, tokens, keys and values]`` may be on CPUs, which have another order within a head."""
BYTES = "int8"
"""The dtype of KV in a form that only the backend knows: it is copied, and not moved."""
INDEX_VALUES, INDEX_SCALE = 128, 4
"""So many values of an index key, of a byte each, have a scale of so many bytes."""


class LayerPages(NamedTuple):
    """The pages of one layer, and what it takes to read them."""

    paged: PagedLayer
    layout: KVLayout
    """The layout of the layer's group."""
    page_size: int

    @property
    def name(self) -> str:
        return self.paged.name

    @property
    def dtype(self) -> torch.dtype:
        return self.paged.tensors[0].dtype


def possible_pages(model: EngineModel, index: int) -> dict[PageFormat, PagedLayer]:
    """The pages of one layer in each format that its tensors may have: what the layer writes shows which it is.

    Raises Unsupported for tensors that have no known format. The name of the attention backend does not matter.
    """
    name = model.layer_names[index]
    layer = model.layer(name)
    pages = layer.kv_cache
    if keeps_index_keys(layer):
        return {"split": PagedLayer(name, "split", _index_pages(model, name))}
    if not hasattr(layer, "impl"):
        raise Unsupported(f"{name} is a {type(layer).__name__}, whose KV only the model's own forward writes")
    if isinstance(pages, tuple | list):
        return {"split": PagedLayer(name, "split", _split_pages(model, index, pages))}
    if not isinstance(pages, torch.Tensor):
        raise Unsupported(f"{name} keeps its KV in a {type(pages).__name__}, not in tensors of pages")
    if pages.dtype in (torch.uint8, torch.int8):
        pages = pages.view(FP8.get(model.config.cache_config.cache_dtype, torch.uint8))
    if pages.ndim == 3:
        return {"latent": PagedLayer(name, "latent", (pages,))}
    if pages.ndim != 4:
        raise Unsupported(f"{name} has pages of the shape {list(pages.shape)}, which BlendHub does not know")
    formats: dict[PageFormat, PagedLayer] = {"packed_heads": PagedLayer(name, "packed_heads", (pages,))}
    if pages[0, 0].is_contiguous() and pages.dtype is not torch.uint8:
        joint = (pages.flatten(2),)
        formats |= {format: PagedLayer(name, format, joint) for format in FORMATS_OF_CPUS}
    return formats


def _split_pages(model: EngineModel, index: int, pages: Sequence[Any]) -> Tensors:
    """Keys and values ``[blocks, tokens, heads, width]``, which vllm-ascend keeps in two tensors.

    The layer's tensors say so, and not its backend's name, which vllm-ascend changes.
    """
    name, shapes = model.layer_names[index], [tuple(getattr(part, "shape", ())) for part in pages]
    if len(pages) != 2 or any(len(shape) != 4 for shape in shapes) or len({shape[1:3] for shape in shapes}) != 1:
        raise Unsupported(
            f"{name} keeps its KV in {len(pages)} tensors of the shapes {shapes}; BlendHub knows keys and values "
            "[blocks, tokens, heads, width] in two tensors"
        )
    if shapes[0][1] != model.page_sizes[name]:
        raise Unsupported(f"{name} has pages of {shapes[0][1]} tokens, and its metadata count {model.page_sizes[name]}")
    if any(part.dtype not in SPLIT_DTYPES for part in pages):
        raise Unsupported(f"{name} keeps quantised KV ({pages[0].dtype}, {pages[1].dtype}); serve without quantised KV")
    # With MLA the latent comes first. Only the other tensor is rotated, as keys are.
    keys, values = reversed(pages) if keeps_latent(model.layer(name)) else pages
    return keys, values


def _index_pages(model: EngineModel, name: str) -> Tensors:
    """The values of index keys ``[blocks, tokens, 1, width]``, and their scales: a page has the values of all of its
    tokens, and behind them the scales. So the bytes of a token are copied as those of a key and of a value."""
    layer, n_tokens = model.layer(name), model.page_sizes[name]
    pages = layer.kv_cache
    n_scales, rest = divmod(pages.shape[-1], INDEX_VALUES + INDEX_SCALE)
    if layer.uses_shuffled_layout or pages.dtype is not torch.uint8 or pages.shape[1:2] != (n_tokens,) or rest:
        raise Unsupported(
            f"{name} keeps the keys of an indexer in pages of {pages.dtype} and of the shape {list(pages.shape)}, or "
            f"in tiles; BlendHub knows pages of bytes for {n_tokens} tokens"
        )
    widths = n_scales * INDEX_VALUES, n_scales * INDEX_SCALE
    values, scales = pages.view(len(pages), -1).split_with_sizes([n_tokens * width for width in widths], -1)
    return values.unflatten(1, (n_tokens, 1, widths[0])), scales.unflatten(1, (n_tokens, 1, widths[1]))


def shape_of(model: EngineModel, index: int) -> tuple[int, int, int, str]:
    """The heads of a layer's KV, the widths of their keys and values, and the dtype."""
    layer, pages = model.layer(model.layer_names[index]), next(iter(possible_pages(model, index).values()))
    dtype, first = DTYPES[pages.tensors[0].dtype], pages.tensors[0]
    if pages.format == "latent":
        return 1, first.shape[-1], 0, dtype
    if pages.format == "split":
        keys, values = pages.tensors
        return *keys.shape[2:], values.shape[-1], dtype
    if dtype == BYTES:
        return first.shape[1], first.shape[-1], 0, dtype
    return layer.num_kv_heads, layer.head_size, value_width(layer), dtype


def state_bytes(name: str, states: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """All states of a recurrent layer as bytes ``[blocks, n]``. Raises Unsupported unless the parts of a state follow
    each other in a block."""
    found = [tuple(getattr(part, "shape", ())) for part in states]
    if [shape[1:] for shape in found] != list(map(tuple, shapes)):
        raise Unsupported(f"{name} keeps its state in tensors of the shapes {found}, and vLLM says {list(shapes)}")
    first, n = states[0], 0
    stride, start = first.stride(0) * first.element_size(), first.storage_offset() * first.element_size()
    for part in states:
        follows = part.storage_offset() * part.element_size() == start + n
        if not (follows and part[0].is_contiguous() and part.stride(0) * part.element_size() == stride):
            raise Unsupported(f"{name} keeps its state in tensors that do not follow each other in a block")
        n += part[0].numel() * part.element_size()
    flat = torch.empty(0, dtype=torch.int8, device=first.device).set_(first.untyped_storage())
    return flat.as_strided((len(first), n), (stride, 1), start)


def value_width(layer: Any) -> int:
    """The width of the values of one of vLLM's layers."""
    return int(getattr(layer, "head_size_v", None) or layer.head_size)


def read(layer: LayerPages, slots: torch.Tensor) -> Tensors:
    """Keys and values of the tokens at these slots, each ``[n, heads, width]``, as copies."""
    keys, values = planes_of(layer.paged, layer.page_size, layer.layout)
    # Some devices' operators write with slots of int32; torch indexes with int64 everywhere.
    at = slots.to(keys.device, torch.int64)
    page, slot = at // layer.page_size, at % layer.page_size
    return rows_at(keys, page, slot), rows_at(values, page, slot)


def read_as_computed(model: EngineModel, layer: LayerPages, slots: torch.Tensor) -> Tensors:
    """``read``, with values as the model computed them, up to the rounding of the pages."""
    return model.unscaled(layer.name, *read(layer, slots))


def clear_pages(model: EngineModel, layers: Sequence[LayerPages], tables: Sequence[Blocks], span: Span) -> None:
    """Clear the blocks in which the tokens of a span stand, in the order of the engine's own work.

    Blocks of models with recurrent layers may have been blocks of states, whose bytes need not be numbers to an
    attention layer. An attention kernel may multiply what stands behind the tokens by 0, and then nothing is a number.
    vLLM clears blocks that it fills itself, and not those that a connector loads.
    """

    @cache
    def pages_of_table(table: int, page_size: int) -> torch.Tensor:
        size = model.block_sizes[table]
        blocks = tables[table][span.start // size : -(-span.end // size)]
        return model.to_device(pages_in(blocks, size // page_size))

    for layer in layers:
        pages = pages_of_table(model.tables[layer.name], layer.page_size)
        for tensor in layer.paged.tensors:
            # Torch cannot fill numbers of 8 bits by index, and ``tensor[pages] = 0`` would wait for the device.
            (tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor).index_fill_(0, pages, 0)
