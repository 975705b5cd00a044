"""Names for what KV depends on: the weights of a model, or of a LoRA adapter, as they are loaded, and the model's
configuration."""

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from transformers import PretrainedConfig
from vllm.platforms import current_platform
from vllm.utils import deep_gemm

from blendhub.vllm.model.platform import keeps_index_keys

OTHERS = ("_name_or_path", "max_model_len", "transformers_version")
"""What decides about no KV: where the model lies, what a model of vLLM notes, and who has read it."""


def fingerprint(*models: torch.nn.Module) -> str:
    """Names the weights as loaded: a sample of each parameter's bytes, by what quantised KV is divided, and how the
    keys of an indexer are written."""
    parameters: list[tuple[str, Any]] = []
    for model in models:
        scales = [pair for pair in model.named_buffers() if pair[0].endswith(("._k_scale", "._v_scale"))]
        parameters += sorted([*model.named_parameters(), *scales], key=lambda pair: pair[0])
        if any(map(keeps_index_keys, model.modules())):
            parameters.append((_form_of_index_keys(), torch.empty(0)))
    return _digest(parameters)


def said_by(configuration: PretrainedConfig) -> str:
    """What a model's configuration says: with other numbers (``--hf-overrides``) the same weights compute other KV."""
    try:  # without defaults: a later version of transformers has more of these
        said = configuration.to_diff_dict()
    except Exception:  # a class that needs arguments cannot say what its defaults are
        said = configuration.to_dict()
    return json.dumps(_plain({name: said[name] for name in said if name not in OTHERS}), sort_keys=True)


def adapter_fingerprint(adapter: Any) -> str:
    """Names the weights of vLLM's ``LoRAModel`` in the same way, in milliseconds: a step waits for it."""
    return _digest(
        (f"{name} {layer.scaling}", part)
        for name, layer in sorted(adapter.loras.items())
        for part in _tensors([layer.lora_a, layer.lora_b])
    )


def _form_of_index_keys() -> str:
    # Since 0.33 vLLM writes their scales as exponents where a GPU's kernels want these: in as many bytes.
    as_exponents = getattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: False)()
    return f"index keys of {current_platform.fp8_dtype()} with scales as {'exponents' if as_exponents else 'numbers'}"


def _digest(tensors: Iterable[tuple[str, Any]]) -> str:
    state = blake2b(digest_size=16)
    for name, tensor in tensors:
        state.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        state.update(_sample(tensor.detach()))
    return state.hexdigest()


def _tensors(parts: Any) -> Iterator[torch.Tensor]:
    """Packed layers have lists of tensors, and None for what the adapter leaves as it is."""
    if isinstance(parts, torch.Tensor):
        yield parts
    elif parts is None:
        yield torch.empty(0)
    else:
        for part in parts:
            yield from _tensors(part)


def _sample(parameter: torch.Tensor) -> bytes:
    """Some items, evenly spread. Flattening would copy all of a parameter that is not contiguous."""
    n = parameter.numel()
    if not n:
        return b""
    at = torch.arange(0, n, max(1, n // 64))[:65]
    # Items of a byte as bytes: not every device can index all kinds of them.
    items = parameter.view(torch.uint8) if parameter.itemsize == 1 else parameter
    chosen = items.reshape(1) if not items.dim() else items[torch.unravel_index(at.to(items.device), items.shape)]
    return chosen.cpu().view(torch.uint8).numpy().tobytes()


def _plain(value: object) -> object:
    """The value as JSON has it. Code that comes with a model may keep anything in its configuration."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if value is None or isinstance(value, str | int | float) else type(value).__name__
