"""On a machine with a GPU, from a plain checkout: all tests of the CUDA device for real, then its benchmark."""

import sys

import blendhub_cuda
import torch

from benchmarks.hardware_check import check

if __name__ == "__main__":
    (plugin,) = blendhub_cuda.blendhub_devices()
    sys.exit(check("gpu", plugin, "plugins/cuda", "benchmarks.device", lambda: {"gpu": torch.cuda.get_device_name()}))
