"""Has vLLM make models as for an H100 on a machine without a GPU: a script, whose arguments are the models."""

import sys
from typing import Any

import torch
import vllm.third_party.pynvml as driver

WITHOUT_COMPILED_OPERATORS: dict[str, Any] = {
    "compilation_config": {"custom_ops": ["none"]},
    "attention_config": {"backend": "TRITON_ATTN"},
}


def find_a_gpu() -> None:
    """What vLLM asks the driver before it decides for a platform."""
    driver.nvmlInit = driver.nvmlShutdown = lambda: None
    driver.nvmlDeviceGetCount = lambda: 1
    driver.nvmlDeviceGetHandleByIndex = lambda number: number
    driver.nvmlDeviceGetCudaComputeCapability = lambda handle: (9, 0)
    driver.nvmlDeviceGetName = lambda handle: "NVIDIA H100"


def make(path: str) -> None:
    import vllm.v1.worker.gpu_model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform

    assert current_platform.is_cuda()
    config = EngineArgs(
        path,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=128,
        max_model_len=2048,
        **WITHOUT_COMPILED_OPERATORS,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{path}/rendezvous", 0, "gloo")
            initialize_model_parallel()
        layer = initialize_model(config).model.layers[0]
        hidden = torch.randn(3, config.model_config.get_hidden_size())
        layer.input_layernorm(layer.input_layernorm(hidden), hidden)


if __name__ == "__main__":
    find_a_gpu()
    torch.set_default_dtype(torch.bfloat16)
    for model in sys.argv[1:]:
        make(model)
