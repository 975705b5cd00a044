"""Where a layer keeps its KV: some is written as the layer writes it, and read back."""

import torch
from vllm import _custom_ops as ops

from blendhub.vllm.model.engine_model import EngineModel
from blendhub.vllm.model.pages import BYTES, LayerPages, read, read_as_computed, value_width
from blendhub.vllm.model.platform import keeps_index_keys

COARSE = 2e-1
"""The largest error of 8-bit floats, relative to the largest number."""


def misplaced(model: EngineModel, index: int, layer: LayerPages) -> str:
    """What is not where ``layer`` says after the layer at ``index`` has written into the first block, which vLLM never
    gives to a request; empty if all is there."""
    if keeps_index_keys(model.layer(layer.name)):
        return _misplaced_index_keys(model, layer)
    if layer.layout.dtype == BYTES:
        return _misplaced_bytes(model, index, layer)
    layout, slots = layer.layout, torch.arange(layer.page_size, device=model.device)
    drawn = (rows.to(layer.dtype) for rows in _drawn(model, layer, layout.kv_heads, layout.key_dim, layout.value_dim))
    # 8-bit floats of a layer with a small scale could not keep numbers around 1.
    keys, values = (rows.to(model.dtype) for rows in model.unscaled(layer.name, *drawn))
    model.write(index, keys, values, slots)
    both = read_as_computed(model, layer, slots)
    for what, written, kept in zip(("keys", "values"), (keys, values), both, strict=True):
        same = torch.equal(written, kept) if layer.dtype is model.dtype else error_of(kept, written) < COARSE
        if not same:
            return what
    return ""


def _misplaced_bytes(model: EngineModel, index: int, layer: LayerPages) -> str:
    """The bytes of a token must not depend on its slot, nor on what the slots beside it hold."""
    slots, attention = torch.arange(layer.page_size, device=model.device), model.layer(layer.name)
    drawn = _drawn(model, layer, attention.num_kv_heads, attention.head_size, value_width(attention))
    keys, values = (rows.to(model.dtype) for rows in drawn)
    kept = []
    for order in (slots, slots.flip(0)):
        model.write(index, keys, values, order)
        kept.append(read(layer, order)[0])
    return "" if torch.equal(*kept) else "bytes"


def _misplaced_index_keys(model: EngineModel, layer: LayerPages) -> str:
    """vLLM's own kernel must gather for each token the bytes that BlendHub reads, whatever they are: only a forward of
    the model could write keys."""
    pages, n = model.layer(layer.name).kv_cache, layer.page_size
    with torch.inference_mode():
        pages[0] = torch.arange(pages[0].numel(), device=model.device).remainder(251).view(pages[0].shape)
        expected = [part[:, 0] for part in read(layer, torch.arange(n, device=model.device))]
        keys, scales = map(torch.empty_like, expected)
        table, ends = (torch.tensor(of, dtype=torch.int32, device=model.device) for of in ([[0]], [0, n]))
        ops.cp_gather_indexer_k_quant_cache(pages, keys, scales, table, ends)
        pages[0] = 0
    return "" if all(map(torch.equal, (keys, scales), expected)) else "index keys"


def _drawn(model: EngineModel, layer: LayerPages, heads: int, *widths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((layer.page_size, heads, width) for width in widths)
    return [torch.rand(shape, generator=generator).to(model.device) for shape in shapes]


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    if not actual.numel():
        return 0.0
    scale = float(expected.float().abs().max()) or 1.0
    error = float((actual.float() - expected.float()).abs().max()) / scale
    return error if error == error else float("inf")
