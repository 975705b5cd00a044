"""The device ``npu`` in an engine on a CPU: its own code, on strict operators and with the host's memory in place of
the NPU's.

``put_in_place`` is called in an engine's process, after ``strict_npu`` and ``engine_stand_ins`` were imported.
"""

from types import SimpleNamespace

import msgspec
import torch


def put_in_place():
    """The connector takes vLLM's platform for that of an NPU, and the plugin ``npu`` finds one."""
    from blendhub_ascend import device

    from blendhub.vllm import connector
    from plugins.ascend.tests import npu_stand_ins, strict_ops

    strict_ops.define()
    torch.npu.is_available = lambda: True
    connector.current_platform = SimpleNamespace(device_type="npu")
    # The pages of an engine on a CPU lie in host memory, which the plugin's own factory refuses.
    device.create = lambda options: npu_stand_ins.device_on_npu_runtime(
        npu_stand_ins.A2, **msgspec.structs.asdict(options)
    )


def what_vllm_has_switched_on():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    config = get_kv_transfer_group()._vllm_config
    return {
        "prefix caching": config.cache_config.enable_prefix_caching,
        "chunked prefill": config.scheduler_config.enable_chunked_prefill,
    }
