"""The CUDA device: pages lie in GPU memory, and transfers run beside the engine's work."""

from collections.abc import Callable, Sequence

import torch

from blendhub.contracts import AttentionRules
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages, Runtime, StreamDevice
from blendhub_cuda import CudaOptions
from blendhub_cuda.attention import CudaAttention
from blendhub_cuda.launcher import Launcher
from blendhub_cuda.runtime import CudaRuntime


class CudaDevice(StreamDevice):
    torch_type = "cuda"
    formats = ("packed_heads", "split", "latent")
    """Only CPU backends use ``packed_transposed``."""
    name = "cuda"
    streams_per_queue = 2
    reaches_arena = True

    def __init__(self, options: CudaOptions, runtime: Callable[[torch.device], Runtime] = CudaRuntime) -> None:
        super().__init__(options.staging_mib, options.block_tokens, runtime)

    def _mover(self, pages: Pages, layout: KVLayout, block_size: int) -> Launcher:
        return Launcher(pages, layout, block_size)

    def attention(self, rules: Sequence[AttentionRules], dtype: torch.dtype, group: int = 0) -> CudaAttention:
        return CudaAttention(*self._pages_of(group), rules, dtype)
