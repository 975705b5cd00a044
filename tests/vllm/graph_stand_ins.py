"""vLLM's CUDA graphs of pieces in a process without a GPU, as far as a model's caller sees them.

A graph computes what stands in the runner's buffers, as many tokens as it was captured for, and leaves its result in
memory that the next one overwrites.
"""

from typing import Any

import torch

from tests.vllm import gpu_stand_ins

SIZES = [8, 16, 32, 64, 128, 256]


def put_in_place(*backend: str) -> None:
    """The code for GPUs, and a second model runner that replays "graphs" and says so."""
    gpu_stand_ins.put_in_place(*backend)
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    runners: Any = GPUModelRunner
    initialize = runners.initialize_kv_cache

    def initialize_with_graphs(self: Any, *given: Any, **named: Any) -> None:
        initialize(self, *given, **named)
        manager, compilation = self.cudagraph_manager, self.vllm_config.compilation_config
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = SIZES, SIZES[-1]
        compilation.splitting_ops = ["vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"]
        manager.cudagraph_mode, manager._graphs_captured = CUDAGraphMode.PIECEWISE, True
        manager._init_candidates()
        compute, pool = self.model.forward, []

        def replay(input_ids: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
            context = get_forward_context()
            if context.cudagraph_runtime_mode != CUDAGraphMode.PIECEWISE:
                return compute(input_ids=input_ids, positions=positions, **others)
            n, buffers = context.batch_descriptor.num_tokens, self.input_buffers
            read = {"input_ids": input_ids, "positions": positions, "is_padding": context.is_padding}
            for name, given in read.items():
                assert given.data_ptr() == getattr(buffers, name).data_ptr() and len(given) == n, name
            assert all(len(slots) == n for slots in context.slot_mapping.values())
            print(f"replays {n} for {n - int(context.is_padding.sum())} tokens", flush=True)
            computed = compute(input_ids=input_ids, positions=positions, **others)
            if not pool:
                pool.append(computed.new_empty(SIZES[-1], computed.shape[1]))
            pool[0].fill_(torch.nan)
            pool[0][:n] = computed
            return pool[0][:n]

        self.model.forward = replay

    runners.initialize_kv_cache = initialize_with_graphs
