"""Without a GPU the kernels run in Triton's interpreter, which is decided here, where they are imported first."""

import os
from unittest import mock

import torch
import triton  # noqa: F401  # imported without the interpreter, which only our kernels use

HAS_GPU = torch.cuda.is_available()

with mock.patch.dict(os.environ, {} if HAS_GPU else {"TRITON_INTERPRET": "1"}):
    import blendhub_cuda.attention_kernel
    import blendhub_cuda.kernels  # noqa: F401
