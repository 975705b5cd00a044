"""The kernels for CUDA in Triton's interpreter, where there is no GPU. The first import of them decides that: tests
outside of the plugin import them from here."""

import os
from unittest import mock

import torch
import triton  # noqa: F401  # imported without the interpreter, which only our kernels use

with mock.patch.dict(os.environ, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}):
    from blendhub_cuda import CudaOptions, attention, kernels
    from blendhub_cuda.device import CudaDevice

__all__ = ["CudaDevice", "CudaOptions", "attention", "kernels"]
