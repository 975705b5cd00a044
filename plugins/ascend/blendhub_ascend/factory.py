"""Makes the device. torch_npu is imported here and in the probe alone."""

from importlib import import_module

import torch

from blendhub.core.errors import Unsupported
from blendhub_ascend import AscendOptions
from blendhub_ascend.device import AscendDevice
from blendhub_ascend.runtime import AscendRuntime


def create(options: AscendOptions) -> AscendDevice:
    torch_npu = import_module("torch_npu")

    def runtime(place: torch.device) -> AscendRuntime:
        if place.type != "npu":
            raise Unsupported(
                f"the pages lie on {place}, but device 'npu' supports only pages in NPU memory; choose another device"
            )
        return AscendRuntime(place, torch_npu, options.fast_ops)

    return AscendDevice(options, runtime, torch_npu.npu.get_soc_version)
