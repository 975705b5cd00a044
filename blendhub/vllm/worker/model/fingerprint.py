"""A name for the weights of a model as they are loaded."""

from hashlib import blake2b
from typing import Any

import torch


def fingerprint(model: torch.nn.Module) -> str:
    """Names the weights as loaded: a sample of each parameter's bytes, and by what quantised KV is divided."""
    state = blake2b(digest_size=16)
    scales = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(("._k_scale", "._v_scale"))]
    parameters: list[tuple[str, Any]] = sorted([*model.named_parameters(), *scales], key=lambda pair: pair[0])
    for name, parameter in parameters:
        state.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        flat = parameter.detach().flatten()
        step = max(1, len(flat) // 64)
        state.update(flat[::step][:65].contiguous().cpu().view(torch.uint8).numpy().tobytes() if len(flat) else b"")
    return state.hexdigest()
