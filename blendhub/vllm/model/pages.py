"""How vLLM's attention backends lay out their pages, and the tokens of a page as plain tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from blendhub.contracts import PagedLayer, Rotation
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import planes_of
from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.platforms import Tensors

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
}
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SPLIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PACKED_HEADS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")


def paged_layer(model: EngineModel, index: int, rotation: Rotation | None = None) -> PagedLayer:
    """The pages of one layer; raises Unsupported for a backend whose pages are not known."""
    name = model.layer_names[index]
    layer = model.layer(name)
    pages = layer.kv_cache
    if isinstance(pages, tuple | list):
        return PagedLayer(name, "split", _split_pages(model, index, pages), rotation)
    if not isinstance(pages, torch.Tensor):
        raise Unsupported(f"{name} keeps its KV in a {type(pages).__name__}, not in tensors of pages")
    cache_dtype = model.config.cache_config.cache_dtype
    if pages.dtype is torch.uint8:
        if cache_dtype not in FP8:
            raise Unsupported(f"the KV cache dtype {cache_dtype!r} is not known to BlendHub")
        pages = pages.view(FP8[cache_dtype])
    backend = layer.get_attn_backend().get_name()
    if backend == "CPU_ATTN":
        blocks, heads, tokens, width = pages.shape
        return PagedLayer(name, "packed_transposed", (pages.view(blocks, heads, tokens * width),), rotation)
    if backend in PACKED_HEADS:
        return PagedLayer(name, "packed_heads", (pages,), rotation)
    if "MLA" in backend:
        return PagedLayer(name, "latent", (pages,), rotation)
    raise Unsupported(f"{name} uses the attention backend {backend}, whose pages BlendHub does not know")


def _split_pages(model: EngineModel, index: int, pages: Sequence[Any]) -> Tensors:
    """Keys and values ``[blocks, tokens, heads, width]``, which vllm-ascend keeps in two tensors.

    The layer's tensors say so, and not its backend's name, which vllm-ascend changes.
    """
    name, shapes = model.layer_names[index], [tuple(getattr(one, "shape", ())) for one in pages]
    if len(pages) != 2 or any(len(shape) != 4 for shape in shapes) or len({shape[1:3] for shape in shapes}) != 1:
        raise Unsupported(
            f"{name} keeps its KV in {len(pages)} tensors of the shapes {shapes}; BlendHub knows keys and values "
            "[blocks, tokens, heads, width] in two tensors"
        )
    if shapes[0][1] != model.page_size:
        raise Unsupported(f"{name} has pages of {shapes[0][1]} tokens, and its metadata count {model.page_size}")
    if any(one.dtype not in SPLIT_DTYPES for one in pages):
        raise Unsupported(f"{name} keeps quantised KV ({pages[0].dtype}, {pages[1].dtype}); serve without quantised KV")
    # With MLA the latent comes first. Only the other tensor is rotated, as keys are.
    keys, values = reversed(pages) if model.keeps_latent(index) else pages
    return keys, values


def layout_of(model: EngineModel, chunk_tokens: int) -> KVLayout:
    """The layout of a token's KV on one rank; raises Unsupported if the layers differ."""
    of_layers = [_shape(model, index) for index in range(len(model.layer_names))]
    shapes = set(of_layers[: len(of_layers) - model.n_drafts])
    if not shapes.issuperset(of_layers):
        model.leave_out_drafts()
    if len(shapes) != 1:
        raise Unsupported(f"the layers keep KV of {len(shapes)} shapes: {sorted(map(str, shapes))}")
    heads, key_dim, value_dim, dtype = shapes.pop()
    return KVLayout(
        layers=len(model.layer_names),
        kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=DTYPES[dtype],
        chunk_tokens=chunk_tokens,
    )


def _shape(model: EngineModel, index: int) -> tuple[int, int, int, torch.dtype]:
    """The number of heads, the widths of a key and a value, and the dtype of a layer's KV."""
    layer, pages = model.layer(model.layer_names[index]), paged_layer(model, index)
    if pages.format == "latent":
        return 1, pages.tensors[0].shape[-1], 0, pages.tensors[0].dtype
    if pages.format == "split":
        keys, values = pages.tensors
        return keys.shape[2], keys.shape[3], values.shape[-1], keys.dtype
    return layer.num_kv_heads, layer.head_size, _value_width(layer), pages.tensors[0].dtype


def _value_width(layer: Any) -> int:
    return int(getattr(layer, "head_size_v", None) or layer.head_size)


def read(layer: PagedLayer, layout: KVLayout, block_size: int, slots: torch.Tensor) -> Tensors:
    """Keys and values of the tokens at these slots, each ``[n, heads, width]``, as copies."""
    keys, values = planes_of(layer, block_size, layout)
    # Some devices' operators write with slots of int32; torch indexes with int64 everywhere.
    at = slots.to(keys.device, torch.int64)
    return keys[at // block_size, :, at % block_size], values[at // block_size, :, at % block_size]


def read_as_computed(model: EngineModel, layer: PagedLayer, layout: KVLayout, slots: torch.Tensor) -> Tensors:
    """``read``, with values as the model computed them, up to the rounding of the pages."""
    return model.unscaled(layer.name, *read(layer, layout, model.page_size, slots))
