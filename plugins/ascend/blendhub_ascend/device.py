"""The Ascend device: pages lie in NPU memory, and transfers run beside the engine's work."""

from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from blendhub.contracts import PagedLayer
from blendhub.core.errors import Unsupported
from blendhub.core.layout import KVLayout
from blendhub.devices import Pages, Runtime, StreamDevice
from blendhub_ascend import AscendOptions
from blendhub_ascend.mover import PageMover
from blendhub_ascend.operators import chip_of
from blendhub_ascend.runtime import AscendRuntime

BASE_FORMATS = (-1, 0, 1, 2, 30)
"""The numbers of torch_npu's formats whose memory is what torch's strides say: undefined, NCHW, NHWC, ND, NCDHW."""


class AscendDevice(StreamDevice):
    torch_type = "npu"
    formats = ("split", "latent")
    """vllm-ascend has ``split``. ``latent`` is vLLM's for MLA, to which it may change; packed pages do not occur."""
    dtypes = ("bfloat16", "float16", "float32")
    """KV of 8 bits comes with scales or in private layouts on NPUs."""
    name = "npu"
    streams_per_queue = 3
    """While one stream copies, the next one rotates, and the third writes pages."""

    def __init__(
        self, options: AscendOptions, runtime: Callable[[torch.device], Runtime], soc_version: Callable[[], int]
    ) -> None:
        super().__init__(options.staging_mib, options.block_tokens, runtime)
        self._fast_ops = options.fast_ops
        self._soc_version = soc_version

    def _attach(self, layers: Sequence[PagedLayer], block_size: int, layout: KVLayout) -> None:
        for layer in layers:
            for tensor in layer.tensors:
                # An NPU may keep a tensor in fractal order (NZ), which no view of torch's describes.
                number = torch.ops.npu.get_npu_format(tensor) if tensor.device.type == "npu" else 0
                if number not in BASE_FORMATS:
                    raise Unsupported(
                        f"layer {layer.name!r} has pages in the private format {number} of torch_npu, which device "
                        "'npu' does not support; turn off enable_kv_nz (a 310P has no other format)"
                    )
        super()._attach(layers, block_size, layout)

    def _mover(self, pages: Pages, layout: KVLayout, block_size: int) -> PageMover:
        return PageMover(pages, layout, chip_of(self._soc_version()), self._fast_ops)


def create(options: AscendOptions) -> AscendDevice:
    torch_npu = import_module("torch_npu")

    def runtime(place: torch.device) -> AscendRuntime:
        if place.type != "npu":
            raise Unsupported(
                f"the pages lie on {place}, but device 'npu' supports only pages in NPU memory; choose another device"
            )
        return AscendRuntime(place, torch_npu, options.fast_ops)

    return AscendDevice(options, runtime, torch_npu.npu.get_soc_version)
