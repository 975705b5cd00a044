"""Serving compiles nothing that was not compiled before vLLM watches for it, whatever rotations the checks find."""

from itertools import product

import pytest
import torch

pytest.importorskip("vllm", reason="the adapter needs vLLM; `make setup` installs it")

from blendhub_cuda.device import CudaDevice
from blendhub_cuda.options import CudaOptions

from blendhub.testing.devices.streams import DeferredRuntime
from blendhub.vllm.model.model_check import layout_and_rotations
from blendhub.vllm.model.pages import paged_layer
from blendhub.vllm.worker.worker_start import compile_kernels
from tests.vllm.stand_in_model import StandInModel, rotary

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the pages lie in memory of the CPU here")


class Variants(DeferredRuntime):
    """Notes each kernel with its constants, each of which the compiler compiles once."""

    def __init__(self, found):
        super().__init__()
        self._found = found

    def launch(self, stream, kernel, arguments):
        changing = ("base", "tiles", "planes")
        constants = {name: str(value) for name, value in arguments.items() if name not in changing}
        self._found.add((kernel.kernel.__name__, *constants.items()))


@pytest.mark.parametrize("widths", [[], [8]], ids=["one rotary embedding", "two of different widths"])
def test_serving_compiles_nothing_new(widths):
    model = StandInModel()
    model.module.others = torch.nn.ModuleList(rotary(width=width) for width in widths)
    layout, rotations = layout_and_rotations(model, 32)
    compiled, used = set(), set()
    compile_kernels(lambda: CudaDevice(CudaOptions(), lambda place: Variants(compiled)), model, layout, rotations)
    assert len(rotations) == 2 * (1 + len(widths))
    for chosen in product([None, *rotations], repeat=2):
        device = CudaDevice(CudaOptions(), lambda place: Variants(used))
        device.attach([paged_layer(model, index, one) for index, one in enumerate(chosen)], model.page_size, layout)
        device.close()
    assert used == compiled
