"""How vLLM's attention backends lay out their pages, and the tokens of a page as plain tensors."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from blendhub.contracts import PagedLayer, PageFormat, Rotation
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import planes_of, rows_at
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
        format: PageFormat = "packed_tiles" if getattr(layer, "isa", "") == "amx" else "packed_transposed"
        return PagedLayer(name, format, (pages.view(blocks, heads, tokens * width),), rotation)
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
    if shapes[0][1] != model.page_size_of(name):
        raise Unsupported(
            f"{name} has pages of {shapes[0][1]} tokens, and its metadata count {model.page_size_of(name)}"
        )
    if any(one.dtype not in SPLIT_DTYPES for one in pages):
        raise Unsupported(f"{name} keeps quantised KV ({pages[0].dtype}, {pages[1].dtype}); serve without quantised KV")
    # With MLA the latent comes first. Only the other tensor is rotated, as keys are.
    keys, values = reversed(pages) if model.keeps_latent(index) else pages
    return keys, values


def shape_of(model: EngineModel, index: int) -> tuple[int, int, int, str]:
    """The heads of a layer's KV, the widths of their keys and values, and the dtype."""
    layer, pages = model.layer(model.layer_names[index]), paged_layer(model, index)
    dtype = DTYPES[pages.tensors[0].dtype]
    if pages.format == "latent":
        return 1, pages.tensors[0].shape[-1], 0, dtype
    if pages.format == "split":
        keys, values = pages.tensors
        return *keys.shape[2:], values.shape[-1], dtype
    return layer.num_kv_heads, layer.head_size, _value_width(layer), dtype


def _value_width(layer: Any) -> int:
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
