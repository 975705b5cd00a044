"""vllm-ascend's attention in an engine on a CPU: its own Python, and vLLM 0.23's; and the device ``npu``.

An engine's process imports ``strict_npu``, then this, before it makes an engine. docs/ascend.md lists
what differs from an NPU.
"""

from types import SimpleNamespace

import msgspec
import torch
import vllm
import vllm.platforms.cpu
import vllm_ascend.ops  # noqa: F401  (before the others, which it imports in the one order that works)
from vllm.v1.worker import cpu_model_runner
from vllm_ascend.ascend_config import init_ascend_config
from vllm_ascend.attention.attention_v1 import AscendAttentionBackend, AscendAttentionState
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata


def as_the_runner_of_vllm_ascend(build):
    """vllm-ascend's runner has metadata of another class, slots of int32, and its own choice of a state."""

    def wrapped(common_prefix_len, common_attn_metadata, **others):
        common = common_attn_metadata
        starts = common.query_start_loc_cpu
        lengths = common.seq_lens_cpu_upper_bound
        computed = lengths - starts.diff()
        state = AscendAttentionState.ChunkedPrefill
        if not computed.any():
            state = AscendAttentionState.PrefillNoCache
        elif bool((starts.diff() == 1).all()):
            state = AscendAttentionState.DecodeOnly
        fields = vars(common) | {"_seq_lens_cpu": lengths, "seq_lens_cpu": lengths, "attn_state": state}
        fields["slot_mapping"] = common.slot_mapping.to(torch.int32)
        return build(common_prefix_len, AscendCommonAttentionMetadata(**fields), **others)

    return wrapped


class Runner(cpu_model_runner.CPUModelRunner):
    _has_sinks = False

    def __init__(self, vllm_config, device):
        init_ascend_config(vllm_config)
        print(f"{AscendAttentionBackend.__name__} serves with vLLM {vllm.__version__}", flush=True)
        super().__init__(vllm_config, device)

    @property
    def kernel_block_sizes(self):
        return [[size] for size in self._sizes]

    def initialize_metadata_builders(self, kv_cache_config, kernel_block_sizes):
        self._sizes = kernel_block_sizes
        super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        for groups in self.attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.build = as_the_runner_of_vllm_ascend(builder.build)

    def initialize_kv_cache_tensors(self, kv_cache_config, kernel_block_sizes):
        """Keys and values in two tensors, as there, with an offset in their memory."""
        joint = super().initialize_kv_cache_tensors(kv_cache_config, kernel_block_sizes)
        layers = self.compilation_config.static_forward_context
        for name, pages in joint.items():
            layers[name].kv_cache = joint[name] = (pages[0], pages[1])
        return joint


cpu_model_runner.CPUModelRunner = Runner
vllm.platforms.cpu.CpuPlatform.get_attn_backend_cls = classmethod(
    lambda cls, *given, **named: f"{AscendAttentionBackend.__module__}.{AscendAttentionBackend.__qualname__}"
)


def put_npu_device_in_place():
    """The connector takes vLLM's platform for that of an NPU, and the plugin ``npu`` finds one: its own code, on strict
    operators and with the host's memory in place of the NPU's."""
    from blendhub_ascend import device

    from blendhub.vllm import connector
    from plugins.ascend.tests import npu_stand_ins

    torch.npu.is_available = lambda: True
    connector.current_platform = SimpleNamespace(device_type="npu")
    # The pages of an engine on a CPU lie in host memory, which the plugin's own factory refuses.
    device.create = lambda options: npu_stand_ins.device_on_npu_runtime(
        npu_stand_ins.A2, **msgspec.structs.asdict(options)
    )
